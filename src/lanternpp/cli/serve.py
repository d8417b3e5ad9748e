"""`lanternpp serve`: an HTTP server that draws, with OpenAI's Images API and a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lanternpp.api.options import LONGEST, DrawOptions
from lanternpp.cli import many
from lanternpp.cli import old_options as opt
from lanternpp.cli.overrides import check, draws
from lanternpp.cli.terminal import say, tell_effect
from lanternpp.errors import InputError

_server = partial(typer.Option, rich_help_panel="Server")

Host = Annotated[str, _server(help="Address to listen on; 0.0.0.0: all addresses of this machine.")]
Port = Annotated[int, _server(help="0: any free one.", callback=opt.within(0, 65535))]
Slots = Annotated[int, _server(help="Most pictures of the same settings drawn at once: 1, 2, 4, 8 ...")]
Queue = Annotated[
    int, _server(help="Most pictures that wait; further requests get 429.", callback=opt.within(1))
]
Lanes = Annotated[
    int,
    _server(
        help="Most engines kept; each has the caches for its settings and batch size.", callback=opt.within(1)
    ),
]
Deadline = Annotated[
    float,
    _server(
        metavar="SECONDS",
        help="After which an unfinished picture is given up; its request gets 504.",
        callback=opt.within(0, LONGEST, remedy=f"above 0, at most {LONGEST:,}", above=True),
    ),
]
Drain = Annotated[
    float,
    _server(
        metavar="SECONDS",
        help="For accepted pictures to finish after SIGTERM.",
        callback=opt.within(0, LONGEST),
    ),
]
Key = Annotated[
    list[str] | None,
    _server(
        "--api-key",
        metavar="KEY",
        help="Accept requests with this key; may be given again. Other users of this machine can read it from the list "
        "of processes: prefer --api-key-file, or the variable LANTERNPP_API_KEYS.",
    ),
]
KeyFile = Annotated[Path | None, _server("--api-key-file", metavar="FILE", help="One key per line.")]
NoKey = Annotated[bool, _server("--no-key", help="Accept requests without a key on any --host.")]
AllowHost = Annotated[
    list[str] | None,
    _server(
        metavar="NAME",
        help="A name to accept in the Host header besides those of this machine, such as a proxy's; the proxy must pass "
        "the header on. Pages of other sites are refused all the same. May be given again.",
    ),
]
Proxies = Annotated[
    str | None,
    _server(
        metavar="IPS",
        help="Proxies whose X-Forwarded-For is trusted: addresses or networks, separated by commas; * for any. "
        "Default: none.",
    ),
]
PromptLimit = Annotated[int, _server(help="Most characters of a prompt.", callback=opt.within(1))]
BodyLimit = Annotated[int, _server(help="Most bytes of a request.", callback=opt.within(1))]
Page = Annotated[bool, _server("--page/--no-page", help="Serve the page at /.")]
Replicas = Annotated[
    int | None,
    opt.ray_option(
        metavar="N",
        help="Servers under --ray; default: one for each GPU, else one for every four cores.",
        callback=opt.within(1, 10_000),
    ),
]


@draws()
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    slots: Slots = 8,
    queue: Queue = 64,
    lanes: Lanes = 4,
    deadline: Deadline = 300.0,
    drain: Drain = 60.0,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    no_key: NoKey = False,
    allow_host: AllowHost = None,
    forwarded_allow_ips: Proxies = None,
    prompt_limit: PromptLimit = 1000,
    body_limit: BodyLimit = 1 << 20,
    page: Page = True,
    ray: opt.Ray = None,
    replicas: Replicas = None,
    *,
    options: DrawOptions,
) -> None:
    """Draw over HTTP, with OpenAI's Images API at /v1 and a page at /; many pictures share every pass.

    The method and its options are the defaults of requests. SIGTERM lets accepted pictures finish. With --ray, several
    servers share the work.
    """
    check_slots(slots, options.overrides)
    if ray is None and replicas is not None:
        raise InputError(f"--replicas {replicas} needs Ray; add --ray")
    many.check_ray(ray)

    from lanternpp.serve.config import ServerConfig, check_proxies, gather_keys, require

    require()
    from lanternpp.serve.server import LOOPBACK, bind, run, url

    proxies = check_proxies(forwarded_allow_ips)
    keys = gather_keys(api_key or (), api_key_file)
    if host not in LOOPBACK and not keys and not no_key:
        raise InputError(
            f"--host {host} can be reached by others, and there is no API key; give --api-key-file, or --no-key to let everybody draw"
        )
    names = [*LOOPBACK, *(allow_host or ())] if host in LOOPBACK or allow_host else []
    with bind(host, port) as bound:
        check(options)

        from lanternpp.api.results import drawn_with
        from lanternpp.serve.app import ServerSpec
        from lanternpp.serve.fresh_thread import run_in_fresh_thread

        given = options.method, options.overrides, keys, names, deadline, body_limit, prompt_limit
        spec = ServerSpec(options, ServerConfig(*given, slots, queue, lanes, page))
        if ray is not None:
            from lanternpp.cli.serve_ray import deploy

            deploy(ray, replicas, replace(spec, options=many.with_full_paths(options)), bound, drain, proxies)
            return
        pipe = run_in_fresh_thread(spec.load_model)
        tell_effect(pipe.effect)
        batcher, app = spec.start(pipe)
        chosen = pipe.chosen(options.method)
        label = drawn_with(chosen.method, chosen.why)

        def ready() -> None:
            typer.echo(f"{url(bound)}: {pipe.name} with {label} in {pipe.dtype}, {slots} slots")

        if not run(app, batcher, bound, drain, ready, proxies):
            say("serve", "not all pictures were finished")


def check_slots(slots: int, overrides: Mapping[str, Any]) -> None:
    """Raise InputError where --slots is not a power of two, or --batch-size is given too."""
    if slots < 1 or slots & (slots - 1):
        raise InputError(f"--slots {slots} is not a power of two; use 1, 2, 4, 8 ...")
    if "batch_size" in overrides:
        raise InputError(
            f"--batch-size {overrides['batch_size']} would change nothing: the server decides the batch size itself; use --slots"
        )
