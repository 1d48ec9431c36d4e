"""What gateways ask a worker for: its model, its limits, its load.

Plain translations of what the service and the engine know; fields that are not known stay unset, and no
local path is told. Called by grpc_engine.py.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

import jaxinfer
from serving.grpc_tokenizer import config_json
from serving.service import Phase, Service

INT32_MAX = 2**31 - 1
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
RATE_SECONDS = 1.0  # shortest time over which the throughput is taken


def model_info(service: Service) -> pb.GetModelInfoResponse:
    """Raises Unavailable while the model loads."""
    engine = service.engine
    model, tokenizer = engine.model, engine.model.tokenizer
    longest = engine.core.max_model_len
    recommended = {k: v for k in DEFAULTS if (v := model.generation_config.get(k)) is not None}
    if model.generation_config.get("do_sample") is False:
        recommended["temperature"] = 0.0
    pad = tokenizer.special_tokens.get("pad_token") if tokenizer else None
    return pb.GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        max_context_length=longest,
        vocab_size=model.config.vocab_size,
        served_model_name=service.model_names[0],
        model_type=config_json(model.path).get("model_type", ""),
        architectures=[model.config.architecture],
        eos_token_ids=sorted(model.eos_ids),
        pad_token_id=(tokenizer.token_to_id(pad) or 0) if tokenizer and pad else 0,
        bos_token_id=(tokenizer.bos_id or 0) if tokenizer else 0,
        max_req_input_len=longest - 1,
        default_sampling_params_json=json.dumps(recommended),
    )


def server_info(service: Service) -> pb.GetServerInfoResponse:
    """Raises Unavailable while the model loads."""
    engine = service.engine
    config = engine.core.config
    return pb.GetServerInfoResponse(
        active_requests=len(service.running),
        is_paused=service.phase is not Phase.READY,
        last_receive_timestamp=service.last_receive,
        uptime_seconds=time.time() - service.started,
        server_type="vllm-grpc",  # the name of this protocol's family, which gateways look for
        data_parallel_size=1,
        kv_cache_dtype=engine.core.dtype,
        block_size=config.page_size,
        model_dtype=engine.core.dtype,
        max_num_seqs=config.rows,
        engine_reasoning_parser=service.config.reasoning_parser or "",
    )


class Load:
    """The engine's load, for GetLoads and for the KV event stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since: float | None = None  # when the throughput was last taken
        self._tokens, self._rate = 0, 0.0

    def report(self, dp_rank: int | None) -> pb.GetLoadsResponse:
        """The answer to GetLoads. `dp_rank`: of the only rank, which is 0; None: all."""
        loads = [self._scheduler()] if dp_rank in (None, 0) else []
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=jaxinfer.__version__,
            dp_rank_count=len(loads),
            loads=loads,
        )

    def _scheduler(self) -> pb.SchedulerLoad:
        now = self._now()
        return pb.SchedulerLoad(
            num_running_reqs=now["running"],
            num_waiting_reqs=now["waiting"],
            num_total_reqs=now["running"] + now["waiting"],
            num_used_tokens=now["used"],
            max_total_num_tokens=now["capacity"],
            token_usage=now["usage"],
            gen_throughput=now["rate"],
            cache_hit_rate=now["hit_rate"],
            utilization=now["running"] / now["rows"],
            max_running_requests=now["rows"],
            num_waiting_uncached_tokens=now["waiting_tokens"],
        )

    def record(self) -> common_pb2.EngineLoad | None:
        """The record that goes along with KV events; None while the model loads."""
        service = self._service
        if not service.loaded:
            return None
        now = self._now()
        record = common_pb2.EngineLoad(
            running_requests=now["running"],
            waiting_requests=now["waiting"],
            waiting_uncached_tokens=now["waiting_tokens"],
            token_usage=now["usage"],
            active_token_usage=now["usage"],
            gen_throughput=now["rate"],
            max_running_requests=now["rows"],
            cache_hit_rate=now["hit_rate"],
            num_used_tokens=now["used"],
            max_total_num_tokens=now["capacity"],
            queues=common_pb2.EngineQueues(waiting=now["waiting"]),
            engine_reports_steps=True,
            prefill_pending_tokens=service.waiting()[1],
        )
        if service.running:
            record.engine_silence_ms = int(service.engine.silence() * 1000)
        return record

    def _now(self) -> dict[str, Any]:
        engine = self._service.engine
        stats, config = engine.stats(), engine.core.config
        pool = engine.pool_load()
        queries = stats["prefix_queries"]
        return {
            "running": stats["running"],
            "waiting": stats["waiting"],
            "waiting_tokens": self._service.waiting()[1] if stats["waiting"] else 0,
            "used": min(pool.used, INT32_MAX),
            "capacity": min(pool.total, INT32_MAX),
            "usage": pool.usage,
            "rate": self._throughput(stats["tokens_sampled"]),
            "hit_rate": stats["prefix_hits"] / queries if queries else 0.0,
            "rows": config.rows,
        }

    def _throughput(self, tokens: int) -> float:
        """Tokens a second between the last two looks that were RATE_SECONDS apart."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._tokens = now, tokens
        elif (passed := now - self._since) >= RATE_SECONDS:
            self._rate = (tokens - self._tokens) / passed
            self._since, self._tokens = now, tokens
        return self._rate
