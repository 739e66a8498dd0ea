"""A version of transformers that is not known is refused, unless it is to be tried."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore import Incompatible  # noqa: E402
from kvstore.system.engine_versions import ALLOW  # noqa: E402
from kvstore_transformers import Prefixes, compat  # noqa: E402
from tests.connectors.vllm.tiny_models import make_llama  # noqa: E402

TARGET = "unix:/nowhere/kvstore.sock"


@pytest.mark.parametrize("version", ["5.18.3", "5.25.0", "6.0.0.dev0", "4.57.1"])
def test_others_are_refused_with_the_list(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW, raising=False)
    monkeypatch.setattr(compat.transformers, "__version__", version)
    model = make_llama().eval()
    with pytest.raises(Incompatible, match=r"only 5\.19, 5\.24; .*allow_untested=True"):
        Prefixes(model, TARGET)
    with Prefixes(model, TARGET, allow_untested=True) as prefixes:
        ids = torch.ones((1, 40), dtype=torch.int64)
        assert prefixes.generate(ids, max_new_tokens=2).shape == (1, 42)


@pytest.mark.parametrize("version", ["5.19.0", "5.21.2", "5.24.1"])
def test_those_that_are_known_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW, raising=False)
    monkeypatch.setattr(compat.transformers, "__version__", version)
    Prefixes(make_llama().eval(), TARGET).close()
