"""From the command line and a YAML file to a ServerConfig, and back to YAML.

The keys of the file are the flags' names; the command line wins over the file, the file over the
environment. Nothing is parsed and ignored. Called by commands/serve.py and tests.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.config import engine_config
from jaxinfer.errors import ConfigError
from serving.config import Limits, ServerConfig
from serving.options import Flag
from serving.parsers import check_parsers
from serving.server_options import (
    ENGINE_DEFAULTS,
    FIXED_FLAGS,
    GROUPS,
    GRPC_PORT,
    LIMITS,
    OFF,
    SERVE_ENGINE,
    SERVER,
    Port,
)

Layer = dict[str, dict[str, Any]]  # group -> field -> value

ENVIRONMENT = {"JAXINFER_API_KEY": "api_keys", "JAXINFER_ADMIN_API_KEY": "admin_api_keys"}
HIDDEN = "***"  # what to_yaml shows of a key
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text",
         list[str]: "a text or a list of texts", dict: "a mapping",
         Port: f"a port number or {OFF}"}  # fmt: skip


def server_config(
    model: str | None, typed: Layer, file: Path | None, environment: Mapping[str, str]
) -> ServerConfig:
    """The configuration that the user asked for.

    Args:
        model: the positional argument. typed: what with_options(**GROUPS) gives for each group.
        file: YAML. environment: values of ENVIRONMENT's variables, where they are set.

    Raises ConfigError that names the flag or the key, its value, and what to do.
    """
    if model is not None:
        named = typed["server"].get("model", model)
        if named != model:
            raise ConfigError(f"MODEL={model!r} and --model={named!r} differ; give one of them")
        typed = typed | {"server": typed["server"] | {"model": model}}
    for field, value in typed["fixed"].items():
        _check_fixed(FIXED_FLAGS[field].flag.switches[0][0], field, value, typed)
    layers = [_spelled_out(typed)]
    if file is not None:
        layers.append(_spelled_out(_read(file)))
    merged = {
        group: {k: v for layer in reversed(layers) for k, v in layer[group].items()}
        for group in ("server", "limits", "engine")
    }
    server = merged["server"]
    for variable, field in ENVIRONMENT.items():
        if variable in environment:
            server.setdefault(field, [environment[variable]])
    return _build(server, merged["limits"], merged["engine"])


def _build(server: dict[str, Any], limits: dict[str, Any], engine: dict[str, Any]) -> ServerConfig:
    if not server.get("model"):
        raise ConfigError("no model is given; name it: jaxinfer serve MODEL")
    for field in ENVIRONMENT.values():
        for key in server.get(field, ()):
            _check_key(field, key)
    server.setdefault("grpc_port", GRPC_PORT)
    for field in ("port", "grpc_port"):
        if server.get(field) == OFF:
            server[field] = None
    for flag in LIMITS:  # Limits itself says its own names, which no user typed
        if not limits.get(flag.field, 1) > 0:
            value = limits[flag.field]
            raise ConfigError(f"{flag.spelling}={value!r} must be a number above 0")
    if "chat_template" in server:
        server["chat_template"] = _template(server["chat_template"])
    server = {k: tuple(v) if isinstance(v, list) else v for k, v in server.items()}
    # Wrong engine options are refused here, before a port is opened.
    options = asdict(engine_config(**dict(ENGINE_DEFAULTS) | engine))
    options = {name: value for name, value in options.items() if value is not None}
    config = ServerConfig(**server, engine=options, limits=Limits(**limits))
    check_parsers(config.tool_call_parser, config.reasoning_parser)
    return config


def _check_key(field: str, key: str) -> None:
    flag = next(f for f in SERVER if f.field == field).spelling
    if key == HIDDEN:
        raise ConfigError(f"{flag}={HIDDEN} stands for a key that --print-config hid; give the key")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{flag} has a key that is empty or has characters no header can carry")


def _template(text: str) -> str:
    """Jinja source: the text itself if it has a brace, else that of the file of this name."""
    if "{" in text:
        return text
    try:
        source = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template={text!r} cannot be read: {error}") from None
    if "{" not in source:
        raise ConfigError(f"--chat-template={text!r} is no Jinja template: it has no {{")
    return source


def _check_fixed(name: str, field: str, value: Any, layer: Layer) -> None:
    if field == "tokenizer" and value == layer["server"].get("model"):
        return
    FIXED_FLAGS[field].check(name, value)


def _spelled_out(layer: Layer) -> Layer:
    """A layer whose compatible names are turned into the options they stand for."""
    server, engine = dict(layer["server"]), dict(layer["engine"])
    for name, group, field, value, flag in (
        ("disable_log_stats", server, "stats_interval", 0.0, "--stats-interval"),
        ("skip_server_warmup", engine, "warmup", "lazy", "--warmup"),
    ):
        if layer["compatible"].get(name) and group.setdefault(field, value) != value:
            raise ConfigError(
                f"--{name.replace('_', '-')} and {flag}={group[field]!r} contradict each other; "
                "give one of them"
            )
    return layer | {"server": server, "engine": engine}


# --- the file ---------------------------------------------------------------------------------------


class _Known(NamedTuple):
    group: str
    flag: Flag
    on: bool  # False: the key switches off what the flag switches on


def _index() -> dict[str, _Known]:
    """Every key that a file may have, with underscores."""
    found = {}
    for group, flags in GROUPS.items():
        for flag in flags:
            for names, on in zip(flag.switches, (True, False), strict=True):
                for name in names:
                    if name.startswith("--"):
                        found[_key(name)] = _Known(group, flag, on)
    return found


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _read(path: Path) -> Layer:
    """A YAML file as a layer."""
    values, known = _load(path), _index()
    layer: Layer = {group: {} for group in GROUPS}
    used: dict[tuple[str, str], str] = {}
    for key, value in values.items():
        place = known.get(_key(key)) if isinstance(key, str) else None
        if place is None:
            raise ConfigError(f"{path}: {_unknown(key, known)}")
        first = used.setdefault((place.group, place.flag.field), key)
        if first != key:
            raise ConfigError(f"{path}: {first} and {key} are names of one option; give one")
        if place.group != "fixed":
            value = _value(path, key, place.flag.kind, value)
        if not place.on:
            value = not value
        layer[place.group][place.flag.field] = value
    for field, value in layer["fixed"].items():
        _check_fixed(f"{path}: {used['fixed', field]}", field, value, layer)
    return layer


def _unknown(key: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(_key(str(key)), known, 1)
    hint = f"did you mean {near[0].replace('_', '-')}?" if near else "see jaxinfer serve --help"
    return f"{key} is unknown; {hint}"


def _value(path: Path, key: str, kind: Any, value: Any) -> Any:
    """A value as the flag's kind has it; ConfigError names the key."""
    if kind is float and isinstance(value, str):
        try:
            return float(value)  # YAML takes 1e-3 for a text
        except ValueError:
            pass
    if kind == list[str] and isinstance(value, str):
        return [value]
    number = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        int: number,
        float: number or isinstance(value, float),
        bool: isinstance(value, bool),
        str: isinstance(value, str),
        list[str]: isinstance(value, list) and all(isinstance(v, str) for v in value),
        dict: isinstance(value, dict),
        Port: number or value == OFF,
    }
    if not fits[kind]:
        raise ConfigError(f"{path}: {key}={value!r:.200} must be {WORDS[kind]}")
    return value


def _load(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. Keys that come twice are refused."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(k, deep=True) for k, _ in node.value]  # type: ignore[no-untyped-call]
            twice = {str(k) for k in keys if keys.count(k) > 1}
            if twice:
                raise ConfigError(f"{path}: {', '.join(sorted(twice))} is there twice")
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config={str(path)!r} cannot be read: {error}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of flag names to values")
    return values or {}


def to_yaml(config: ServerConfig) -> str:
    """YAML that `--config` reads back to the same configuration; keys show as HIDDEN."""
    import yaml

    values: dict[str, Any] = {}
    for flags, source in (
        (SERVER, {f.name: getattr(config, f.name) for f in fields(config)}),
        (SERVE_ENGINE, config.engine),
        (LIMITS, asdict(config.limits)),
    ):
        for flag in flags:
            value: Any = source.get(flag.field)
            if flag.field in ("port", "grpc_port") and value is None:
                value = OFF
            if flag.field in ENVIRONMENT.values():
                value = [HIDDEN for _ in value]
            if value is not None and value != () and value != []:
                plain = list(value) if isinstance(value, tuple) else value
                values[flag.switches[0][0].removeprefix("--")] = plain
    return yaml.safe_dump(values, sort_keys=False, width=100)
