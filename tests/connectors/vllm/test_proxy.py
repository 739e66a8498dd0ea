"""The example proxy in front of two servers that say what they were asked, and misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import ClientSession, ClientTimeout, web  # noqa: E402

from kvstore_vllm.examples.proxy import Options, Proxy, Timeline, parse  # noqa: E402

TOLD = {"kvstore": {"source": "ab" * 16, "blocks": 5}, "remote_prefiller": {"remote_port": 1}}
ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 9, "min_tokens": 4, "stream": True}
SOON_S = 20.0


class Server:
    """One of the two. answers: how it answers a POST."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str | None] = []
        self.gone = asyncio.Event()  # a client went away
        self.answers: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.prefilled

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.ids.append(request.headers.get("X-Request-Id"))
        return await self.answers(request)

    async def prefilled(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": TOLD})

    async def refuses(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "too long"}, status=400)

    async def breaks(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "out of memory"}, status=500)

    async def babbles(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=b"[" * 100)

    async def hangs(self, _: web.Request) -> web.StreamResponse:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.gone.set()
            raise
        raise AssertionError("nobody ended it")

    async def streams(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(b"data: {%d}\n\n" % number)
        await response.write_eof()
        return response

    async def dies(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {0}\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


class Scene:
    def __init__(self, url: str, prefill: Server, decode: Server, client: ClientSession) -> None:
        self.url, self.prefill, self.decode, self.client = url, prefill, decode, client

    async def ask(self, body: Any = ASK, **options: Any) -> tuple[int, bytes]:
        async with self.client.post(f"{self.url}/v1/completions", json=body, **options) as answer:
            return answer.status, await answer.read()


async def models(_: web.Request) -> web.StreamResponse:
    return web.json_response({"data": ["m"]})


def run(test: Callable[[Scene], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        prefill, decode = Server(), Server()
        decode.answers = decode.streams
        apps = []
        for server in (prefill, decode):
            app = web.Application()
            app.router.add_post("/v1/completions", server.post)
            app.router.add_get("/v1/models", models)
            apps.append(app)
        async with (
            asyncio.timeout(SOON_S),
            served(apps[0]) as here,
            served(apps[1]) as there,
            served(Proxy(Options(here, there, **options)).app()) as url,
            ClientSession(timeout=ClientTimeout(total=SOON_S)) as client,
        ):
            await test(Scene(url, prefill, decode, client))

    asyncio.run(main())


def test_the_prefill_goes_first_and_its_answer_goes_along() -> None:
    async def test(scene: Scene) -> None:
        own = {"kvstore": {"session_id": "c"}, "mine": 1}
        body = {**ASK, "kv_transfer_params": own}
        status, read = await scene.ask(body, headers={"X-Request-Id": "r-1"})
        assert (status, read) == (200, b"data: {0}\n\ndata: {1}\n\ndata: {2}\n\n")
        (first,) = scene.prefill.asked
        assert first == {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {**own, "do_remote_decode": True},
        }
        told = {**TOLD, "kvstore": {"session_id": "c", **TOLD["kvstore"]}}
        (second,) = scene.decode.asked
        assert second == {**ASK, "kv_transfer_params": {"mine": 1, **told}}
        assert scene.prefill.ids == scene.decode.ids == ["r-1"]
        async with scene.client.get(f"{scene.url}/v1/models") as models:
            assert await models.json() == {"data": ["m"]}

    run(test)


def test_both_requests_go_at_once() -> None:
    async def test(scene: Scene) -> None:
        both = asyncio.Barrier(2)

        async def meets(request: web.Request) -> web.StreamResponse:
            await both.wait()
            return await scene.decode.streams(request)

        scene.prefill.answers = scene.decode.answers = meets
        assert (await scene.ask())[0] == 200
        prefill, decode = (
            each.asked[0]["kv_transfer_params"] for each in (scene.prefill, scene.decode)
        )
        assert prefill.keys() == {"remote_decoder"}
        assert decode.keys() == {"remote_prefiller"}
        remote = decode["remote_prefiller"]
        assert remote["kv_request_id"] == prefill["remote_decoder"]["kv_request_id"]
        assert remote["remote_host"] == "127.0.0.1"
        assert remote["remote_port"] != prefill["remote_decoder"]["remote_port"]

    run(test, concurrent=True)


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("how", ["breaks", "babbles", "hangs", "dies"])
def test_the_answer_comes_whatever_becomes_of_the_prefill(how: str, concurrent: bool) -> None:
    async def test(scene: Scene) -> None:
        scene.prefill.answers = getattr(scene.prefill, how)
        status, read = await scene.ask()
        assert status == 200
        assert read.endswith(b"data: {2}\n\n")
        if how == "hangs":
            await scene.prefill.gone.wait()  # its engine stops computing
        if not concurrent:
            assert not scene.decode.asked[0]["kv_transfer_params"]

    run(test, concurrent=concurrent, prefill_s=0.5)


def test_a_request_that_is_wrong_is_told_so() -> None:
    async def test(scene: Scene) -> None:
        scene.prefill.answers = scene.prefill.refuses
        assert await scene.ask() == (400, b'{"error": "too long"}')
        assert not scene.decode.asked
        assert (await scene.ask([1]))[0] == 400
        async with scene.client.post(f"{scene.url}/v1/completions", data=b"{") as answer:
            assert answer.status == 400

    run(test)


def test_a_decoding_server_that_fails_is_told_to_the_client() -> None:
    async def test(scene: Scene) -> None:
        scene.decode.answers = scene.decode.breaks
        assert await scene.ask() == (500, b'{"error": "out of memory"}')
        scene.decode.answers = scene.decode.dies
        with pytest.raises(aiohttp.ClientPayloadError):  # not an answer that ends early
            await scene.ask()
        scene.decode.answers = scene.decode.hangs
        status, read = await scene.ask()
        assert status == 504
        assert json.loads(read)["error"]["type"] == "proxy_error"

    run(test, idle_s=0.5)


def test_a_client_that_goes_away_ends_both_requests() -> None:
    async def test(scene: Scene) -> None:
        scene.prefill.answers, scene.decode.answers = scene.prefill.hangs, scene.decode.hangs
        asking = asyncio.create_task(scene.ask())
        while not (scene.prefill.asked and scene.decode.asked):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await scene.ask())[0] == 503  # one at a time
        asking.cancel()
        await scene.prefill.gone.wait()
        await scene.decode.gone.wait()

    run(test, concurrent=True, requests_max=1)


def test_a_decoding_server_that_is_not_there() -> None:
    async def main() -> None:
        options = Options("http://127.0.0.1:9", "http://127.0.0.1:9")
        async with (
            served(Proxy(options).app()) as url,
            ClientSession() as client,
            client.post(f"{url}/v1/completions", json=ASK) as answer,
        ):
            assert answer.status == 502
            assert "decoding server" in (await answer.json())["error"]["message"]

    asyncio.run(main())


def test_a_request_is_one_line_of_the_log() -> None:
    timeline = Timeline(prefill="ok", prefill_s=1.25, first_s=1.5)
    line = timeline.line("r-1", 200)
    assert line.startswith(
        "request=r-1 status=200 prefill=ok prefill_s=1.2500 first_s=1.5000 total_s="
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ["--prefill", "10.0.0.1:8000", "--decode", "http://h:1"],
        ["--prefill", "http://h:1/v1", "--decode", "http://h:1"],
        ["--prefill", "http://h:1", "--decode", "http://h:2", "--listen", "9000"],
    ],
)
def test_what_is_no_address_is_refused(wrong: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert "HOST:PORT" in capsys.readouterr().err


def test_options_are_read() -> None:
    options, host, port = parse(
        ["--prefill", "http://[::1]:8000/", "--decode", "http://h", "--listen", "[::]:9000"]
    )
    assert options == Options("http://[::1]:8000", "http://h")
    assert (host, port) == ("::", 9000)
