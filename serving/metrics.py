"""Metrics: the /metrics page and the numbers behind the status page.

Gauges and the engine's counters are read when somebody asks; histograms grow as requests and steps end.
The page is there while the model loads. Never delays a step: `_step` runs in the engine thread and
takes some microseconds. Never holds what a request said. Called by the faces and by status.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString

from jaxinfer.cache import Scope
from jaxinfer.core import EngineCore, StepReport
from jaxinfer.scheduler.stats import KindStats
from serving.calls import Record
from serving.errors import Wire
from serving.metrics_names import (
    ENGINE_COUNTERS,
    HISTOGRAMS,
    KINDS,
    SCHEDULER,
    TOKEN_HISTOGRAMS,
    token_buckets,
)
from serving.metrics_store import Distribution, Ring, SchedulerCounters, Window
from serving.service import Phase, Service

ENGINE = "0"  # label of the one engine behind a server
REASONS = ("stop", "length", "abort", "error")
PAGE_STATES = ("free", "evictable", "protected")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Metrics:
    """Everything that is counted about one Service.

    Attributes:
        on_step: called in the engine thread after each step; must be quick and must not raise.
        finished: calls by finish reason. rejected: refused ones by reason.
        latency: TTFT, ITL and E2E in seconds over the last 5 minutes, as Windows.
        sampled, fed: tokens drawn and tokens computed, as Rings of 2 s.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.on_step: list[Callable[[StepReport], None]] = []
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.rejected: Counter[str] = Counter()
        self.latency = {name: Window() for name in ("ttft", "itl", "e2e")}
        self.sampled, self.fed = Ring(), Ring()
        self._ended: Counter[str] = Counter()  # tokens of the calls in `finished`
        self._faces: Counter[str] = Counter()
        self._histograms = {
            name: Distribution(buckets) for name, (buckets, _) in HISTOGRAMS.items()
        }
        self._step_time = self._histograms["jaxinfer:step_time_seconds"]
        self._step_tokens = self._histograms["vllm:iteration_tokens_total"]
        self._core: EngineCore | None = None
        self._previous: Callable[[StepReport], None] | None = None  # what `_step` has replaced
        self._scheduler: SchedulerCounters | None = None
        self._registry = CollectorRegistry()
        self._registry.register(_Page(self))
        ProcessCollector(registry=self._registry)
        service.on_finish.append(self._finish)
        service.on_reject.append(self._reject)
        service.on_phase.append(self._phase)
        self._attach()

    def render(self) -> tuple[bytes, str]:
        """(body, content type) of the metrics page, in Prometheus' text format; in the event loop."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def tokens(self) -> dict[str, int]:
        """Tokens of all calls so far, running ones included: "prompt", "cached" and "output".

        Each output token counts once, when it is handed out. A prompt counts once it is computed.
        """
        total = Counter(self._ended)
        for record in self._service.running.values():
            total.update(_tokens(record))
        return {name: total[name] for name in ("prompt", "cached", "output")}

    def scheduler(self) -> dict[str, int]:
        """Preemptions, prefix_queries and prefix_hits (tokens) since the start; {} while loading."""
        return self._scheduler.read() if self._scheduler else {}

    # --- what happens ---------------------------------------------------------------------------

    def _attach(self) -> None:
        """Watch the engine once it is there."""
        if self._core is not None or not self._service.loaded:
            return
        self._core = core = self._service.engine.core
        buckets = token_buckets(core.max_model_len)
        self._histograms |= {name: Distribution(buckets) for name in TOKEN_HISTOGRAMS}
        self._scheduler = SchedulerCounters(core)
        if core.on_step is not None:  # another server's on the same engine
            self.on_step.append(core.on_step)
        self._previous, core.on_step = core.on_step, self._step

    def _phase(self, phase: Phase) -> None:
        self._attach()
        if phase is Phase.STOPPED and self._core is not None and self._core.on_step == self._step:
            self._core.on_step = self._previous

    def _step(self, report: StepReport) -> None:
        self._step_time.observe(report.seconds)
        self._step_tokens.observe(report.tokens)
        self.sampled.add(report.sampled)
        self.fed.add(report.tokens)
        if self._scheduler is not None:
            self._scheduler.watch()
        for observe in self.on_step:
            observe(report)

    def _reject(self, wire: Wire) -> None:
        self.rejected[wire.code or "invalid_request"] += 1

    def _finish(self, record: Record) -> None:
        self._attach()
        self.finished[record.reason] += 1
        self._faces[record.call.face] += 1
        counts = _tokens(record)
        self._ended.update(counts)
        params, observe = record.call.params, self._observe
        longest = max(record.output_tokens)
        observe("vllm:request_prompt_tokens", record.prompt_tokens)
        observe("vllm:request_generation_tokens", counts["output"])
        observe("vllm:request_max_num_generation_tokens", longest)
        observe("vllm:request_params_n", params.n)
        if params.max_tokens is not None:
            observe("vllm:request_params_max_tokens", params.max_tokens)
        if counts["prompt"]:
            observe("vllm:request_prefill_kv_computed_tokens", counts["prompt"] - counts["cached"])
        self._observe_times(record, longest)

    def _observe_times(self, record: Record, longest: int) -> None:
        end, start, token = record.finished, record.first_scheduled, record.first_token
        assert end is not None
        observe = self._observe
        observe("vllm:e2e_request_latency_seconds", end - record.arrival)
        self.latency["e2e"].add(end - record.arrival)
        if start is not None:
            observe("vllm:request_queue_time_seconds", start - record.arrival)
            observe("vllm:request_inference_time_seconds", end - start)
        if token is not None:
            observe("vllm:time_to_first_token_seconds", token - record.arrival)
            self.latency["ttft"].add(token - record.arrival)
            observe("vllm:request_decode_time_seconds", end - token)
            if start is not None:
                observe("vllm:request_prefill_time_seconds", token - start)
            if longest > 1:
                observe("vllm:request_time_per_output_token_seconds", (end - token) / (longest - 1))
        if record.intervals:  # there may be a million
            for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
                self._histograms[name].observe_all(record.intervals)
            self.latency["itl"].add_all(record.intervals)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(max(0.0, value))

    # --- what the page shows --------------------------------------------------------------------

    def families(self) -> Iterator[Metric]:
        """All metric families, as they stand now."""
        page = _Labels(self._service.model_names[0])
        yield from self._service_families(page)
        for name, distribution in self._histograms.items():
            help_ = HISTOGRAMS[name][1] if name in HISTOGRAMS else TOKEN_HISTOGRAMS[name]
            yield page.histogram(name, help_, distribution)
        if self._core is not None:
            yield from self._engine_families(page, self._core)

    def _service_families(self, page: _Labels) -> Iterator[Metric]:
        service = self._service
        tokens = self.tokens()
        yield page.counter(
            "vllm:prompt_tokens", "Prompt tokens, cached ones included.", tokens["prompt"]
        )
        yield page.counter(
            "vllm:prompt_tokens_cached",
            "Prompt tokens that the prefix cache spared.",
            tokens["cached"],
        )
        yield page.counter("vllm:generation_tokens", "Output tokens.", tokens["output"])
        yield page.counters(
            "vllm:request_success", "Ended requests.", "finished_reason", self.finished
        )
        yield page.counters(
            "vllm:admission_rejections", "Refused requests.", "reason", self.rejected
        )
        yield page.counters("jaxinfer:requests", "Ended requests by face.", "face", self._faces)
        yield page.gauge(
            "jaxinfer:requests_in_flight",
            "Requests that the faces are answering.",
            len(service.running),
        )
        yield page.gauge("jaxinfer:ready", "1 while requests are taken.", service.ready)
        yield page.gauges(
            "jaxinfer:phase",
            "1 for the phase that the server is in.",
            ("phase",),
            {(phase.value,): phase is service.phase for phase in Phase},
        )
        yield page.gauge(
            "jaxinfer:start_time_seconds", "Unix time of the server's start.", service.started
        )

    def _engine_families(self, page: _Labels, core: EngineCore) -> Iterator[Metric]:
        engine = self._service.engine
        stats, usage, kinds = engine.stats(), engine.pool_load().usage, core.scheduler.stats().kinds
        for key, (name, help_) in ENGINE_COUNTERS.items():
            yield page.counter(name, help_, stats[key])
        padding = max(0, stats["token_slots"] - stats["tokens_fed"])
        yield page.counter("jaxinfer:padding_tokens", "Room in steps that held no token.", padding)
        counts = self.scheduler()
        for key, (names, help_) in SCHEDULER.items():
            yield from (page.counter(name, help_, counts[key]) for name in names)
        yield page.gauge("vllm:num_requests_running", "Sequences that run.", stats["running"])
        yield page.gauge("vllm:num_requests_waiting", "Sequences that wait.", stats["waiting"])
        yield page.gauges(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by what they wait for.",
            ("reason",),
            {("capacity",): stats["waiting"], ("deferred",): 0},
        )
        yield page.gauge("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", usage)
        yield page.gauges(
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in; it never sleeps.",
            ("sleep_state",),
            {(state,): state == "awake" for state in SLEEP_STATES},
        )
        yield page.gauge(
            "jaxinfer:silence_seconds",
            "Since the engine loop last began a round, while it has work.",
            self._service.engine.silence(),
        )
        yield from self._cache_families(page, kinds)
        paged = (kind.total for kind in kinds if kind.scope != Scope.STATE)
        yield _cache_config(core, next(paged, 0))

    def _cache_families(self, page: _Labels, kinds: Sequence[KindStats]) -> Iterator[Metric]:
        yield page.gauges(
            "jaxinfer:pages",
            "Pages (recurrent states: slots) of each cache kind by state.",
            ("kind", "state"),
            {(kind.name, state): getattr(kind, state) for kind in kinds for state in PAGE_STATES},
        )
        for key, name, help_ in (
            ("total", "jaxinfer:pages_capacity", "Pages or slots that a cache kind has."),
            ("cached", "jaxinfer:pages_cached", "Those in the prefix tree, in use or not."),
        ):
            values = {(kind.name,): getattr(kind, key) for kind in kinds}
            yield page.gauges(name, help_, ("kind",), values)
        yield page.gauge(
            "jaxinfer:cache_unit_tokens",
            "The shortest prefix that another prompt can reuse; 0: none can.",
            self._service.engine.cache_unit,
        )
        counts = self._scheduler.kinds() if self._scheduler else {}
        for key, values in counts.items():
            yield page.counters(*KINDS[key], "kind", values)


class _Page:
    """The collector that prometheus_client asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


class _Labels:
    """Makes families that carry the model's name and the engine's number."""

    def __init__(self, model: str) -> None:
        self._values = (model, ENGINE)

    def gauge(self, name: str, help_: str, value: float) -> Metric:
        return self.gauges(name, help_, (), {(): value})

    def gauges(
        self, name: str, help_: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
    ) -> Metric:
        family = GaugeMetricFamily(name, help_, labels=("model_name", "engine", *labels))
        for key, value in values.items():
            family.add_metric((*self._values, *key), float(value))
        return family

    def counter(self, name: str, help_: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_, labels=("model_name", "engine"))
        family.add_metric(self._values, float(value))
        return family

    def counters(self, name: str, help_: str, label: str, values: Counter[str]) -> Metric:
        family = CounterMetricFamily(name, help_, labels=("model_name", "engine", label))
        for key, value in values.items():
            family.add_metric((*self._values, key), float(value))
        return family

    def histogram(self, name: str, help_: str, distribution: Distribution) -> Metric:
        family = HistogramMetricFamily(name, help_, labels=("model_name", "engine"))
        buckets, seen = [], 0
        bounds = (*map(floatToGoString, distribution.bounds), "+Inf")
        for bound, count in zip(bounds, list(distribution.counts), strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        family.add_metric(self._values, buckets, distribution.total)
        return family


def _cache_config(core: EngineCore, blocks: int) -> Metric:
    """What routers read to know the page size and the size of the pool."""
    labels = {
        "engine": ENGINE,
        "block_size": str(core.config.page_size),
        "num_gpu_blocks": str(blocks),
        "cache_dtype": core.dtype,
        "enable_prefix_caching": str(core.config.enable_prefix_caching),
        "gpu_memory_utilization": str(core.config.memory_fraction),
    }
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "How the cache is configured.", labels=list(labels)
    )
    family.add_metric(list(labels.values()), 1.0)
    return family


def _tokens(record: Record) -> dict[str, int]:
    """Tokens of one call that count by now."""
    computed = record.first_token is not None or record.reason in ("stop", "length")
    return {
        "prompt": record.prompt_tokens if computed else 0,
        "cached": record.cached_tokens if computed else 0,
        "output": sum(record.output_tokens),
    }
