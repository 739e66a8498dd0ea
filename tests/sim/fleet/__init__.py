"""Several stores on one virtual clock, with a network that loses, doubles, delays, cuts and flips.

network   who reaches whom, and what becomes of a message
link      a `PeerLink` over it, and the lender's end
etcd      what `EtcdMembership` calls, in memory: away, emptied, slow
bucket    one that some of the hosts share
truth     what each host may serve
host      a store, its disks, its engines, from one start to the next
world     one seed
"""
