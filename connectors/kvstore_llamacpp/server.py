"""llama-cpp-python's own server, with its prompts kept by kvstore.

    kvstore serve &
    python -m kvstore_llamacpp.server --model model.gguf --n_ctx 8192

It takes the options of `python -m llama_cpp.server`. KVSTORE_TARGET names the daemon; without it,
the daemon is found as by the `kvstore` command. `--cache` is of no use beside it, and is ignored.
HTTP headers carry hints: see `kvstore_llamacpp.hints`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvstore_llamacpp.hints import HintHeaders

logger = logging.getLogger(__name__)

Load = Callable[[Any], Any]


def with_cache(load: Load, **options: Any) -> Load:
    """Return what loads a model as `load` does, and gives it a cache that ends with it.

    options: of KVStoreCache.
    """

    def loading(settings: Any) -> Any:
        from kvstore_llamacpp.cache import KVStoreCache

        if settings.cache:
            logger.warning("cache=%s ignored: kvstore keeps the prompts", settings.cache_type)
            settings = settings.model_copy(update={"cache": False})
        llama = load(settings)
        cache = KVStoreCache(llama, **options)
        llama.set_cache(cache)
        llama._stack.callback(cache.close)  # the server closes a model before it loads another
        return llama

    return loading


def main() -> None:
    """Run the server until it is stopped."""
    from llama_cpp.server import __main__ as server
    from llama_cpp.server.model import LlamaProxy

    logging.basicConfig(level=logging.INFO)
    load = LlamaProxy.load_llama_from_model_settings
    LlamaProxy.load_llama_from_model_settings = staticmethod(with_cache(load))
    create_app = server.create_app
    server.create_app = lambda *args, **kwargs: HintHeaders(create_app(*args, **kwargs))
    server.main()


if __name__ == "__main__":
    main()
