"""`lanternpp serve`: an HTTP server that draws, with OpenAI's Images API and a page."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from lanternpp.api.options import LONGEST, DrawOptions
from lanternpp.cli import options as opt
from lanternpp.cli.many import RayOptions, with_full_paths
from lanternpp.cli.terminal import say, tell_effect
from lanternpp.errors import InputError
from lanternpp.serve.config import LOOPBACK, ServerConfig, check_proxies, gather_keys, require
from lanternpp.util.options import Option

Host = Annotated[str, Option("Address to listen on; 0.0.0.0: all addresses of this machine.", group="Server")]
Port = Annotated[int, Option("0: any free one.", ge=0, le=65535, group="Server")]
Drain = Annotated[
    float,
    Option("Seconds for accepted pictures to finish after SIGTERM.", ge=0, le=LONGEST, group="Server"),
]
Key = Annotated[
    list[str] | None,
    Option(
        "Accept requests with this key; may be given again. Other users of this machine can read the key in the list of "
        "processes: prefer --api-key-file, or the variable LANTERNPP_API_KEYS.",
        metavar="KEY",
        group="Server",
    ),
]
KeyFile = Annotated[Path | None, Option("One key per line.", metavar="FILE", group="Server")]
NoKey = Annotated[bool, Option("Accept requests without a key on any --host.", group="Server")]
AllowHost = Annotated[
    list[str] | None,
    Option(
        "A name to accept in the Host header besides those of this machine, such as a proxy's; the proxy must pass the "
        "header on. Pages of other sites are refused all the same. May be given again.",
        metavar="NAME",
        group="Server",
    ),
]
Proxies = Annotated[
    str | None,
    Option(
        "Proxies whose X-Forwarded-For is trusted: addresses or networks, separated by commas; * for any. Default: none.",
        metavar="IPS",
        group="Server",
    ),
]
Replicas = Annotated[
    int | None,
    Option(
        "Servers under --ray; default: one for each GPU, else one for every four cores.",
        ge=1,
        le=10_000,
        metavar="N",
        group="Ray",
    ),
]


@opt.verb
def serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    drain: Drain = 60.0,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    no_key: NoKey = False,
    allow_host: AllowHost = None,
    forwarded_allow_ips: Proxies = None,
    config: Annotated[ServerConfig, opt.Without(("method", "overrides", "keys", "hosts"))] = ServerConfig(
        deadline=300.0
    ),
    on: RayOptions = RayOptions(),
    replicas: Replicas = None,
    options: DrawOptions = DrawOptions(),
) -> None:
    """Draw over HTTP, with OpenAI's Images API at /v1 and a page at /; many pictures share every pass.

    The method and its options are the defaults of requests. SIGTERM lets accepted pictures finish. With --ray, several
    servers share the work.
    """
    if "batch_size" in options.overrides:
        raise InputError(
            "--batch-size would change nothing: the server decides the batch size itself; use --slots"
        )
    if on.ray is None and replicas is not None:
        raise InputError(f"--replicas {replicas} needs Ray; add --ray")
    on.check()
    require()
    proxies, keys = check_proxies(forwarded_allow_ips), gather_keys(api_key or (), api_key_file)
    if host not in LOOPBACK and not keys and not no_key:
        raise InputError(
            f"--host {host} can be reached by others, and there is no API key; give --api-key-file, or --no-key to let everybody draw"
        )
    hosts = (*LOOPBACK, *(allow_host or ())) if host in LOOPBACK or allow_host else ()
    from lanternpp.serve import server

    with server.bind(host, port) as bound:
        opt.check(options)

        from lanternpp.api.results import drawn_with
        from lanternpp.serve import ray_serve
        from lanternpp.serve.app import ServerSpec
        from lanternpp.serve.fresh_thread import run_in_fresh_thread

        config = replace(config, method=options.method, overrides=options.overrides, keys=keys, hosts=hosts)
        spec, out = ServerSpec(with_full_paths(options), config), sys.stdout
        if on.ray is not None:

            def ready(info: ray_serve.ReplicaInfo) -> None:
                tell_effect(info.effect)
                # Ray's messages go to sys.stdout, which is therefore discarded while Ray runs
                print(
                    f"{server.url(bound)}: {info.model} with {options.method} in {info.dtype}, {info.replicas} replicas of "
                    f"{config.slots} slots",
                    file=out,
                    flush=True,
                )

            finished = ray_serve.run(on.ray, replicas, spec, bound, drain, ready, proxies)
        else:
            pipe = run_in_fresh_thread(spec.load_model)
            tell_effect(pipe.effect)
            batcher, app = spec.start(pipe)
            chosen = pipe.chosen(options.method)
            label = drawn_with(chosen.method, chosen.why)
            line = f"{server.url(bound)}: {pipe.name} with {label} in {pipe.dtype}, {config.slots} slots"
            finished = server.run(app, batcher, bound, drain, lambda: print(line, flush=True), proxies)
        if not finished:
            say("serve", "not all pictures were finished")
