"""Chat templates: from messages to the text that a model was taught to go on from."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from s3ac_jax.data.hf_tokenizer import HFTokenizer, TokenizerError, read_json, token_text


class NoTemplate(TokenizerError):
    """A folder without a chat template, as those of base models are. Source: ours."""


_TURNS = (
    "{%- for message in messages %}"
    "{%- set text = message['content'] %}"
    "{%- if message['role'] == 'assistant' and '</think>' in text %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
)
_SILENT = "{%- if enable_thinking is defined and not enable_thinking %}"
_NO_THOUGHT = "{{- '<think>\\n\\n</think>\\n\\n' }}"

# By family: for folders that come without a template of their own.
BUILT_IN: dict[str, str] = {
    "qwen25_math": (
        "{%- if messages[0]['role'] != 'system' %}"
        "{{- '<|im_start|>system\\nPlease reason step by step, and put your final answer within "
        "\\\\boxed{}.<|im_end|>\\n' }}"
        "{%- endif %}" + _TURNS + "{%- endif %}"
    ),
    "r1_distill": (
        "{{- bos_token }}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'system' %}{{- message['content'] }}"
        "{%- elif message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}"
        "{%- else %}"
        "{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] }}"
        "{{- '<｜end▁of▁sentence｜>' }}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}"
        "{%- if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}"
        "{%- endif %}{%- endif %}"
    ),
    "qwen3": _TURNS + _SILENT + _NO_THOUGHT + "{%- endif %}{%- endif %}",
    "qwen3_5": (
        _TURNS + _SILENT + _NO_THOUGHT + "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
    ),
}


def family_of(model_type: str, tokenizer: HFTokenizer) -> str | None:
    """Which built-in template a folder of this model_type wants, None if none is known.

    Source: ours: R1-Distill is a Qwen2 by its config and has turns of its own.
    """
    if tokenizer.has("<｜Assistant｜>"):
        return "r1_distill"
    if model_type.startswith(("qwen3_5", "intern_s2")):
        return "qwen3_5"
    return {"qwen2": "qwen25_math", "qwen3": "qwen3", "qwen3_moe": "qwen3"}.get(model_type)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may name.

    Source: ours, on the templates of Hugging Face's folders.
    """

    source: str
    tokens: Mapping[str, str]
    where: str = "chat template"

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """The conversation as text; enable_thinking: the template's own habit when None.

        Raises TokenizerError when the template can't be read or refuses the messages.
        Source: Hugging Face's chat templates, their environment included.
        """
        return self.render_all(
            [messages], add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )[0]

    def render_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, str]]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[str]:
        """`render` of many conversations, the template read once. Source: ours."""
        jinja2, environment = _environment()
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        given = {**self.tokens, "tools": None, "documents": None, **thinking}
        try:
            template = environment.from_string(self.source)
            return [
                template.render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **given,
                )
                for messages in conversations
            ]
        except jinja2.TemplateError as error:
            raise TokenizerError(f"{self.where}: {' '.join(str(error).split())}") from error
        # What a template's own expressions raise, as Python would.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            said = " ".join(str(error).split())
            raise TokenizerError(f"{self.where}: {type(error).__name__}: {said}") from error


def load_template(folder: str | pathlib.Path, tokenizer: HFTokenizer) -> ChatTemplate:
    """The template of the folder: chat_template.jinja, that of tokenizer_config.json, or built in.

    Of several named templates the one called "default" is taken.
    Raises NoTemplate when there is none, TokenizerError when it can't be read.
    Source: the format of Hugging Face's folders.
    """
    folder = pathlib.Path(folder)
    said = read_json(folder, "tokenizer_config.json")
    tokens = {
        name: text
        for name, value in said.items()
        if name.endswith("_token") and (text := token_text(value)) and isinstance(text, str)
    }
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(_text(file), tokens, str(file))
    where, own = str(folder / "tokenizer_config.json"), said.get("chat_template")
    if isinstance(own, list):
        named = _named(own, where)
        if "default" not in named:
            raise TokenizerError(
                f"{where}: chat_template has {', '.join(named) or 'nothing'}, but no 'default'"
            )
        own = named["default"]
    if own:
        if not isinstance(own, str):
            raise TokenizerError(f"{where}: chat_template must be text, got {own!r}")
        return ChatTemplate(own, tokens, where)
    model_type = read_json(folder, "config.json").get("model_type")
    family = family_of(model_type if isinstance(model_type, str) else "", tokenizer)
    if family is None:
        raise NoTemplate(
            f"{folder} has no chat template and none is built in for model_type {model_type!r}; "
            f"put a chat_template.jinja there"
        )
    if tokenizer.bos_id is not None:
        tokens.setdefault("bos_token", tokenizer.decode([tokenizer.bos_id], special=True))
    return ChatTemplate(BUILT_IN[family], tokens, f"built-in template {family}")


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} can't be read ({error}); fetch the folder again") from error


def _named(own: list[Any], where: str) -> dict[str, Any]:
    """Templates by name."""
    for one in own:
        if not isinstance(one, dict) or not all(
            isinstance(one.get(key), str) for key in ("name", "template")
        ):
            raise TokenizerError(
                f"{where}: each chat_template of a list needs a name and a template, both text"
            )
    return {one["name"]: one["template"] for one in own}


def _environment() -> tuple[Any, Any]:
    """(jinja2, the environment in which the templates of Hugging Face's folders are written)."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        raise TokenizerError(
            "chat templates need the package jinja2: pip install 's3ac-jax[hf]'"
        ) from error

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what the assistant wrote; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012, jinja2 reads it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    # Typed by jinja2 as what it puts there itself.
    known: Any = environment.globals
    known["raise_exception"] = refuse
    known["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return jinja2, environment
