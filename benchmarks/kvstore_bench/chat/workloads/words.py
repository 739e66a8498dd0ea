"""The word list of the synthetic conversations: short, common, one token in most vocabularies.

The order is part of the generator's format: changing it changes every generated conversation.
"""

from __future__ import annotations

_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education foot boy age policy music market
sense nation plan college interest death experience effect use class control field development
role effort rate heart drug show leader light voice wife police mind price report decision son
view relationship town road arm difference value building action season society tax director
position player record paper space ground form event matter center couple site project hit base
activity star table court oil situation cost industry figure street image phone data picture
practice piece land product doctor wall patient worker news test movie north love support
technology step baby computer type attention film tree source organization hair look chance
evening window culture century river garden summer winter bridge letter stone horse island
mountain forest ocean village kitchen dinner bread coffee sugar salt apple orange green blue red
white black small large long short early late quick slow open close clear bright dark warm cold
new old young high low good great little own other same different next last few public able and
but then because while after before where when every often never always still again almost
across under over near behind between without through against toward within along
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
