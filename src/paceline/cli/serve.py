"""`paceline serve`: the OpenAI-compatible server, and the page at its root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options, serve_models
from paceline.cli.config_file import Settings, config_option
from paceline.cli.pulling import pulls
from paceline.cli.terminal import console, loading_bars
from paceline.errors import ConfigError

KEY_VARIABLE = "PACELINE_API_KEY"
OPERATOR_VARIABLE = "PACELINE_OPERATOR_KEY"
PREFIX = "PACELINE_SERVE_"
"""Of environment variables that stand for options."""


def _server(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Server")


def _client(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="What clients may ask for")


def _cluster(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Cluster")


def _keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    """Those of the command line, and those of the environment, which no list of processes shows."""
    return (*(given or ()), *(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()))


def _events(address: str | None, replay: str | None, caching: bool) -> Any:
    """Who publishes them; None: nobody."""
    if address is not None and not caching:
        raise ConfigError("--kv-events tells what the prefix cache holds: leave --no-prefix-caching out.")
    if address is None:
        if replay is not None:
            raise ConfigError("--kv-events-replay needs --kv-events: say where they are published.")
        return None
    from paceline.cluster.kv_publisher import KVEventsPublisher

    return KVEventsPublisher(address, replay)


def settings() -> Settings:
    """What a file may say."""
    return Settings(pulls(serve), PREFIX, serve_models.TABLES, serve_models.MODEL_PARAMETERS)


def of_tables(given: Mapping[str, Any]) -> list[str | None]:
    """The models that a file's tables name."""
    tables = given["context"].meta.get(serve_models.TABLES, [])
    return [table.get(name) for table in tables for name in ("model", "draft")]


def serve(
    context: typer.Context,
    model: options.ModelArgument = None,
    named: Annotated[list[str] | None, options._engine(
        "The same, by an option; repeatable: several models are served by name, loaded when they are asked for.",
        "--model", "-m")] = None,
    draft: Annotated[str | None, options._engine("A smaller model that drafts for it, named the same way; short for "
                                                 "--speculation with the method draft.")] = None,
    config: Annotated[Path | None, config_option(settings)] = None,
    host: Annotated[str, _server("Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, _server("Port; 0: any free one.")] = 8000,
    model_name: Annotated[str | None, _server("What clients call the model. Default: as it was given.")] = None,
    api_key: Annotated[
        list[str] | None,
        _server(f"Ask for this key; repeatable. Or set {KEY_VARIABLE} (several: separated by commas)."),
    ] = None,
    operator_key: Annotated[
        list[str] | None,
        _server("A key that also sees /metrics and everybody's requests on the page; repeatable. Or set "
                f"{OPERATOR_VARIABLE}. Without any, a key that is the only one does."),
    ] = None,
    keys_file: Annotated[
        Path | None,
        _server("TOML file with a table [[keys]] for each key: key, and if it differs from others operator and the "
                "limits below."),
    ] = None,
    requests_per_minute: Annotated[int | None, _server("Most requests a key may send in a minute; further ones get "
                                                       "429.")] = None,
    tokens_per_minute: Annotated[int | None, _server("Most tokens, of prompts and answers, a key may use in a "
                                                     "minute.")] = None,
    concurrent_requests: Annotated[int | None, _server("Most requests of a key at once.")] = None,
    share_cache: Annotated[bool, _server("Keys share caches and what drafters remember of texts; else each key has "
                                         "its own.", "--share-cache")] = False,
    cors_origin: Annotated[list[str] | None, _server("Web origin that may call from a browser; repeatable.")] = None,
    allowed_host: Annotated[
        list[str] | None,
        _server("Another name by which this server may be called; repeatable. Without a key, a server that listens on "
                "this machine alone answers to localhost only."),
    ] = None,
    max_body_mb: Annotated[float | None, _server("Largest request body, in megabytes. Default: what the context can "
                                                 "need, at most 8.")] = None,
    max_output_tokens: Annotated[int | None, _client("Most tokens a sample may get.")] = None,
    max_samples: Annotated[int, _client("Most samples (prompts times n) of one call.")] = 128,
    max_n: Annotated[int, _client("Most samples of one prompt (n, best_of).")] = 16,
    max_beams: Annotated[int, _client("Most beams of one search.")] = 8,
    max_logprobs: Annotated[int, _client("Most log-probabilities beside each token.")] = 20,
    max_draft_tokens: Annotated[int, _client("Largest k and nodes of a request's speculation.")] = 64,
    max_priority: Annotated[int | None, _client("Highest priority a request may have. Default: 100, and 0 with "
                                                "several keys.")] = None,
    allow_speculation: Annotated[
        list[str] | None,
        _client("Method that requests may name; repeatable. default: those that cost others little; files: options "
                "that name files; none.")] = None,
    max_queue: Annotated[int, _server("Most samples that wait; further ones get 429.")] = 256,
    max_connections: Annotated[int, _server("Most connections at once; further ones get 503.")] = 512,
    stall_timeout: Annotated[float, _server("Seconds a client may leave its answer unread.")] = 60.0,
    timeout: Annotated[float | None, _client("Most seconds a request may take.")] = None,
    drain: Annotated[float, _server("Seconds running requests may go on after SIGTERM.")] = 30.0,
    page: Annotated[bool, _server("The page at /, which shows recent requests to the key that sent them.",
                                  "--page/--no-page")] = True,
    pooling: Annotated[str, _server("Embeddings are the mean of a text's hidden states (mean), or those of its last "
                                    "token (last).")] = "mean",
    stored_responses: Annotated[int, _server("Responses of /v1/responses kept in memory for each key, the oldest "
                                             "given up first; 0: none.")] = 256,
    stored_mb: Annotated[float, _server("Megabytes of them for each key.")] = 16.0,
    chat_template: Annotated[Path | None, _server("File with the chat template to use instead of the model's own "
                                                  "(Jinja).")] = None,
    trust_request_chat_template: Annotated[bool, _client(
        "Requests may bring chat templates of their own, which run in a sandbox.",
        "--trust-request-chat-template")] = False,
    lenient: Annotated[bool, _client("Drop fields of requests that are unknown here, and say so in the log and in the "
                                     "answer, instead of refusing them.", "--lenient")] = False,
    tool_parser: Annotated[str, _server("auto (by the chat template), hermes, llama3-json, mistral, "
                                             "mistral-args, qwen-coder or harmony.")] = "auto",
    log_format: Annotated[str, _server("text or json.")] = "text",
    otel: Annotated[bool, _server("Send a span of every finished request to an OpenTelemetry collector; OTEL_* "
                                  "variables say where and how.", "--otel")] = False,
    otel_endpoint: Annotated[str | None, _server("Its address, such as http://localhost:4318; implies --otel.")] = None,
    kv_events: Annotated[
        str | None,
        _server("Publish which blocks of text the cache holds, their tokens included, over ZMQ at this address (or "
                "port of this machine), such as tcp://127.0.0.1:5557, in vLLM's format.")] = None,
    kv_events_replay: Annotated[
        str | None, _server("Where subscribers that missed some can ask for them again; with --kv-events.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    quantization: options.Quantization = None,
    deterministic: options.Deterministic = None,
    kernels: options.KernelChoice = "auto",
    max_model_len: options.MaxModelLen = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    tensor_parallel_address: Annotated[str | None, options._engine(
        "HOST:PORT at which those of other hosts are waited for (docs/cluster.md).")] = None,
    max_num_seqs: Annotated[int | None, options._engine("Most sequences that run at once.")] = None,
    max_batch_tokens: Annotated[int | None, options._engine("Most tokens of one step.")] = None,
    max_step_ms: Annotated[float, options._engine("About so long a step may take while somebody decodes: prompts are "
                                                  "computed in chunks of that size.")] = 100.0,
    target_ttft_ms: Annotated[float | None, options._engine(
        "When a first token should be there: no drafts while one would be late.")] = None,
    target_tpot_ms: Annotated[float | None, options._engine(
        "How long a further token should take: drafts of slower requests come first.")] = None,
    models_memory: Annotated[float | None, _server(
        "GiB that several models may take together, those not used for longest being unloaded. Default: 80% of the "
        "memory that is free at the start, or --gpu-memory-utilization of a card.")] = None,
    model_idle: Annotated[float, _server("Seconds after which one of several models that nobody uses is unloaded; 0: "
                                         "never.")] = 0.0,
    kv_blocks: Annotated[int | None, options._engine("Blocks of the cache.")] = None,
    kv_cache_memory: Annotated[float | None, options._engine(
        "GiB that the cache may take, in place of --kv-blocks.")] = None,
    gpu_memory_utilization: Annotated[
        float, options._engine("Share of a card's memory that weights and cache may take.")] = 0.9,
    prefix_caching: Annotated[bool, options._engine("Share equal beginnings of prompts.",
                                                    "--prefix-caching/--no-prefix-caching")] = True,
    preemption: Annotated[str, options._engine("A request that loses its blocks is computed again (recompute), kept in "
                                               "host memory (swap), or the cheaper of both (auto).")] = "auto",
    swap_space: Annotated[float | None, options._engine("GiB of host memory to swap to.")] = None,
    host_cache: Annotated[float, options._engine("GiB of host memory for beginnings that the cache has no room "
                                                 "for.")] = 0.0,
    capture: Annotated[str, options._engine("Steps on a card are captured before the first request (start), when first "
                                            "needed (lazy) or never.")] = "start",
    speculation: options.SpeculationText = "auto",
    watch_share: Annotated[float, options._engine("Share of the requests that speculate which are run once more "
                                                  "without, when there is room, and compared; 0: none.")] = 0.01,
    watch_action: Annotated[str, options._engine("What an alarm of that watch does: off (its method drafts no more) or "
                                                 "report.")] = "off",
    lora: options.Lora = None,
    head: options.Head = None,
    replicas: Annotated[int | None, _cluster("Engines, each in a process of its own, behind this server; needs "
                                             "paceline[cluster].")] = None,
    prefill_replicas: Annotated[int | None, _cluster("In place of --replicas: engines that compute prompts, and hand "
                                                     "what they computed to --decode-replicas.")] = None,
    decode_replicas: Annotated[int | None, _cluster("Engines that write the answers to those prompts.")] = None,
    prefill_threads: Annotated[int | None, _cluster("Threads of each prefill replica. Default: as --threads.")] = None,
    prefill_speculation: Annotated[str | None, _cluster("Speculation of prefill replicas, which draft nothing: those "
                                                        "without need not load a draft model. Default: as "
                                                        "--speculation.")] = None,
    transfer: Annotated[str, _cluster("How they hand it over: auto (shared memory within a machine, TCP between "
                                      "machines), shared-memory, tcp, cuda-ipc or nixl.")] = "auto",
    ray: Annotated[str | None, _cluster("Address of the Ray cluster to run them on (HOST:PORT or auto). Default: one "
                                        "is started on this machine, and stopped again.")] = None,
    routing: Annotated[str, _cluster("Who gets a request: prefix (who has most of it cached, unless much busier), "
                                     "round-robin or random.")] = "prefix",
    autoscale: Annotated[str | None, _cluster("MIN:MAX replicas, by what waits and by targets missed.")] = None,
    threads: Annotated[int | None, options._engine("Threads of the engine, or of each replica. Default: one a core, "
                                                   "shared by the replicas.")] = None,
) -> None:
    """Serve a model over OpenAI's HTTP API, with a page to try it and look inside."""
    try:
        from paceline.serve import logs, server, telemetry
        from paceline.serve.keys_file import KeysFile, read_keys
        from paceline.serve.options import ServeOptions
        from paceline.serve.quotas import Quota
    except ImportError as error:
        raise ConfigError(f"The server needs the package {error.name!r}: install Paceline with its dependencies "
                          "(fastapi, uvicorn, prometheus-client).") from None
    from paceline import AsyncLLM

    tables = serve_models.wanted(context, model, named)
    for_all = {name: context.params[name] for name in serve_models.MODEL_PARAMETERS}
    given = for_all | tables[0]
    model, model_name = given["model"], given["model_name"]
    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
              "concurrent_requests": concurrent_requests}
    quota = Quota(**{name: limit for name, limit in limits.items() if limit is not None})
    filed = KeysFile() if keys_file is None else read_keys(keys_file, quota)
    settings = ServeOptions(
        host=host, port=port, model_name=model_name or model or options.DEFAULT_MODEL,
        api_keys=(*_keys(api_key, KEY_VARIABLE), *filed.clients),
        operator_keys=(*_keys(operator_key, OPERATOR_VARIABLE), *filed.operators), quota=quota, key_quotas=filed.quotas,
        share_cache=share_cache, cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()), max_body_bytes=None if max_body_mb is None else int(max_body_mb * 1e6),
        max_output_tokens=max_output_tokens, max_samples=max_samples, max_n=max_n, max_beams=max_beams,
        max_logprobs=max_logprobs, max_draft_tokens=max_draft_tokens, max_priority=max_priority,
        allow_speculation=tuple(allow_speculation or ("default",)),
        max_connections=max_connections, stall_s=stall_timeout, timeout_s=timeout, drain_s=drain, page=page,
        pooling=pooling, stored_responses=stored_responses, stored_bytes=int(stored_mb * 1e6),
        tool_parser=given["tool_parser"], log_format=log_format, lenient=lenient,
        trust_request_chat_template=trust_request_chat_template)
    spans = telemetry.otlp_provider(otel_endpoint) if otel or otel_endpoint is not None else None
    several = len(tables) > 1
    if several:
        serve_models.check_several(for_all, {
            "replicas": replicas, "prefill_replicas": prefill_replicas, "decode_replicas": decode_replicas, "ray": ray,
            "autoscale": autoscale, "kv_events": kv_events, "tensor_parallel_address": tensor_parallel_address})
    elif models_memory is not None or model_idle:
        raise ConfigError("--models-memory and --model-idle are for several models: name them with a --model for each, "
                          "or leave these out.")
    if model_idle < 0 or (models_memory is not None and not models_memory > 0):
        raise ConfigError("--models-memory is a number of GiB above 0, --model-idle a number of seconds, 0 or more.")
    apart = (prefill_replicas, decode_replicas, prefill_threads, prefill_speculation)
    clustered = any(one is not None for one in (replicas, ray, autoscale, *apart))
    if clustered and kv_events is not None:
        raise ConfigError("--kv-events tells of one engine's cache, and replicas have one each: leave it out, the "
                          "front routes by what they hold anyway; or serve them one by one behind a router of yours.")
    if clustered and tensor_parallel_address is not None:
        raise ConfigError("--tensor-parallel-address is one engine's, and every replica would wait there for its "
                          "ranks: leave it out, a replica's ranks are on one machine; or serve without replicas.")
    listening = server.listen(settings)
    events = _events(kv_events, kv_events_replay, prefix_caching)
    engine = {} if several else serve_models.engine_options(given) | {
        "tensor_parallel_address": tensor_parallel_address}
    place = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"

    def announce() -> None:
        out = console()
        names = ", ".join(own.get("model_name") or own["model"] for own in tables) if several else settings.model_name
        out.print(f"{names} {'are' if several else 'is'} served at {place}/v1", markup=False)
        shown = f"the page: {place}/   " if page else ""
        out.print(f"{shown}metrics: {place}/metrics   Ctrl-C ends it", style="dim", markup=False)
        out.file.flush()

    if clustered:
        from paceline.cluster.environment import set_for_own_ray
        from paceline.cluster.options import ClusterOptions, read_autoscale

        cluster = ClusterOptions(
            replicas=replicas, prefill_replicas=prefill_replicas, decode_replicas=decode_replicas, transfer=transfer,
            ray=ray, routing=routing, autoscale=read_autoscale(autoscale),
            threads=given["threads"],
            prefill_threads=prefill_threads, ranks=tensor_parallel_size, drain_s=drain)
        if prefill_speculation is not None and not cluster.apart:
            raise ConfigError("--prefill-speculation is for --prefill-replicas: replicas that do everything have "
                              "--speculation.")
        if ray is None:
            set_for_own_ray()
        from paceline.cluster.reading import ModelTexts
        from paceline.cluster.serving import serve_replicas

        with loading_bars() as progress:
            texts = ModelTexts.read(model, progress, engine["chat_template"])
        logs.configure(log_format)
        serve_replicas(cluster, settings, engine, texts, listening, announce, spans,
                       prefill_speculation=... if prefill_speculation is None else options.speculation(
                           prefill_speculation))
        return
    if several:
        from paceline.config import GIB
        from paceline.serve.app import several_app
        from paceline.serve.several import Several

        limit = serve_models.default_limit(device, gpu_memory_utilization) if models_memory is None else int(
            models_memory * GIB)
        specs = serve_models.specs(tables, for_all, limit)
        with loading_bars() as progress:
            loaded = serve_models.preloaded(tables, specs, limit, progress)
        logs.configure(log_format)
        house = Several(specs, settings, limit, idle_s=model_idle, max_queue=max_queue, loaded=loaded, spans=spans)
        server.run_app(lambda: several_app(house), house.llm, settings, listening, announce)
        serve_models.leave(house.pool)
        return
    with loading_bars() as progress:
        llm = AsyncLLM(progress=progress, warm_up=True, threads=given["threads"], **engine)
    if events is not None:  # nobody has a request yet: the engine's thread does nothing
        events.attach(llm.engine.cache.prefix, lambda: llm.engine.adapters.names_by_revision)
    logs.configure(log_format)
    try:
        server.run(llm, settings, listening, announce, spans)
    finally:
        if events is not None:
            events.close()
