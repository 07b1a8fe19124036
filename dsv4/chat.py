"""Conversations as DeepSeek-V4 was trained to read them. The checkpoint ships no chat template.

    BOS system
    User text Assistant </think> answer EOS        one earlier turn; its reasoning is left out
    User text Assistant </think>                   the turn to answer, without thinking
    User text Assistant <think>                    the same, with thinking

The strings stand side by side without spaces or line breaks. Markup inside a text counts as markup.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dsv4.text import Tokenizer

# U+FF5C and U+2581 stand in the vocabulary where one expects "|" and "_".
BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
THINK = "<think>"
END_THINK = "</think>"
MARKUP = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)

ROLES = ("system", "user", "assistant")
REASONING = ("reasoning_content", "reasoning")
LATER_ROLES = ("tool", "developer", "latest_reminder")
LATER_KEYS = ("tools", "tool_calls", "tool_call_id", "task", "response_format")

Message = Mapping[str, Any]


def to_chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    thinking: bool = False,
    *,
    tools: Any = None,
    effort: str | None = None,
) -> Tensor:
    """The body of `Dsv4.to_chat_tokens`: ids [1, s] on the CPU."""
    if tools is not None:
        raise NotImplementedError("tools: the encoding of tools and their calls has not landed")
    if effort is not None:
        raise NotImplementedError(
            f"effort={effort!r}: its text differs between releases and has not landed; put it at the head of the system turn"
        )
    text = to_chat_text(messages, thinking)
    if tokenizer.backend is not None:
        missing = [markup for markup in MARKUP if tokenizer.backend.token_to_id(markup) is None]
        if missing:
            raise ValueError(
                f"this tokenizer has no token {missing[0]!r}: it is not DeepSeek-V4's; write the conversation out and use to_tokens"
            )
    return tokenizer.to_tokens(text)


def to_chat_text(messages: Sequence[Message], thinking: bool = False) -> str:
    """The conversation as one string; after a user turn it ends where the answer has to begin.

    Args:
        messages: {"role": "system" | "user" | "assistant", "content": str}, an assistant turn with
            "reasoning_content" where it has one. System stands first; answers follow user turns.
        thinking: let the model think before the next answer. Reasoning is kept only of answers
            after the last user turn, and only with thinking.
    """
    turns = [_checked(i, message) for i, message in enumerate(messages)]
    if not turns:
        raise ValueError("messages is empty; expected at least one turn")
    roles = [role for role, _, _ in turns]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    text = BOS
    for i, (role, content, reasoning) in enumerate(turns):
        if role == "system":
            if i > 0:
                raise ValueError(f"messages[{i}]: a system turn stands first, before all others")
            text += content
            continue
        keeps_reasoning = thinking and i >= last_user
        if role == "user":
            text += USER + content
            if i + 1 == len(turns) or roles[i + 1] == "assistant":
                text += ASSISTANT + (THINK if keeps_reasoning else END_THINK)
            continue
        if i == 0 or roles[i - 1] != "user":
            raise ValueError(f"messages[{i}]: an assistant turn follows a user turn")
        text += (reasoning + END_THINK if keeps_reasoning else "") + content + EOS
    return text


def _checked(i: int, message: Message) -> tuple[str, str, str]:
    """(role, content, reasoning)."""
    if not isinstance(message, Mapping):
        raise TypeError(f"messages[{i}] is {type(message).__name__}; expected a dict with a role")
    role = message.get("role")
    if role in LATER_ROLES:
        raise NotImplementedError(f"messages[{i}]: the role {role!r} has not landed")
    if role not in ROLES:
        raise ValueError(f"messages[{i}] has role {role!r}; expected one of {', '.join(ROLES)}")
    for key in message:
        if key in LATER_KEYS and message[key]:
            raise NotImplementedError(f"messages[{i}]: {key!r} has not landed")
        if key not in ("role", "content", *REASONING, *LATER_KEYS):
            raise ValueError(f"messages[{i}] has the key {key!r}; expected role and content")
    given = [message[key] for key in REASONING if message.get(key)]
    if given and role != "assistant":
        raise ValueError(f"messages[{i}]: only an assistant turn has reasoning, not {role!r}")
    content, reasoning = message.get("content"), given[0] if given else ""
    if content is None and role == "assistant":
        content = ""
    for what, value in (("content", content), ("reasoning_content", reasoning)):
        if not isinstance(value, str):
            raise TypeError(f"messages[{i}]: {what} is {type(value).__name__}; expected a str")
    return role, content, reasoning
