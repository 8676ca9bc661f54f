"""From a body of text to token ids: chat template, answer prefix, exactly one BOS.

The template is rendered once around a placeholder, so the body never passes through it and nothing
that edits a body can touch the template. The answer prefix follows the generation header: the model
continues its own half-finished sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLACEHOLDER = "xsparse-body-goes-here"
# Some templates print the date of today, but a prompt must be the same tomorrow. transformers lets
# no function into a template from outside, so the day is fixed by a macro of the same name.
_DAY = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday"}
_FIXED_DAY = (
    "{%- macro strftime_now(layout) -%}{{ layout"
    + "".join(f" | replace('{code}', '{text}')" for code, text in _DAY.items())
    + " }}{%- endmacro %}"
)


class Prompt:
    """Token ids of a text, and which token holds a given character."""

    def __init__(self, tokenizer: Any, text: str):
        self._tokenizer = tokenizer
        self.text = text
        self._encoding = tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        self.ids: list[int] = list(self._encoding["input_ids"])

    def token_at(self, character: int) -> int:
        if getattr(self._tokenizer, "is_fast", False):
            # White space may be dropped by a tokenizer and then belongs to no token.
            for offset in range(character, min(character + 8, len(self.text))):
                token = self._encoding.char_to_token(offset)
                if token is not None:
                    return token
        head = self._tokenizer(self.text[:character], add_special_tokens=False)
        return len(head["input_ids"])


class PromptFormat:
    """The frame around a body: `head + body + tail + answer prefix`, as text."""

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        head, self.tail = _chat_frame(tokenizer, chat_template_kwargs or {})
        self.head = self._one_bos(head)
        self.frame = head + self.tail

    def encode(self, body: str, answer_prefix: str) -> Prompt:
        return Prompt(self._tokenizer, self.head + body + self.tail + answer_prefix)

    def encode_raw(self, text: str) -> Prompt:
        """A text that already holds its chat template."""
        return Prompt(self._tokenizer, self._one_bos(text))

    def _one_bos(self, text: str) -> str:
        """Templates, tokenizers and files may each bring a BOS: keep one if any asks for it."""
        bos = self._tokenizer.bos_token
        if not bos:
            return text
        ids = self._tokenizer("a")["input_ids"]
        wanted = text.startswith(bos) or ids[:1] == [self._tokenizer.bos_token_id]
        while text.startswith(bos):
            text = text[len(bos) :]
        return bos + text if wanted else text


def _chat_frame(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}],
        tokenize=False,
        add_generation_prompt=True,
        chat_template=template,
        # Otherwise a reasoning model's answer prefix would land in its thoughts.
        **{"enable_thinking": False, **kwargs},
    )
    if text.count(_PLACEHOLDER) != 1:
        times = text.count(_PLACEHOLDER)
        raise ValueError(f"chat template shows the user's message {times} times, expected once")
    head, _, tail = text.partition(_PLACEHOLDER)
    return head, tail
