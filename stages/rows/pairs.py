"""One prompt and two answers out of what a preference row holds.

Known are: answers alone beside a prompt; whole conversations, whose shared start is the prompt;
and transcripts in one string ("\\n\\nHuman: ...\\n\\nAssistant: ...").
"""

import re
from os.path import commonprefix

from stages.text.messages import Message, Unusable

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")

Turns = list[Message]


def split_pair(
    prompt: str | Turns | None, chosen: str | Turns, rejected: str | Turns
) -> tuple[Turns, Turns, Turns]:
    """(prompt, chosen, rejected) as text or clean messages -> prompt and the turns after it.

    Unusable where there is no shared prompt, where the answers do not start with the assistant, or
    where the prompt column contradicts the conversations.
    """
    if isinstance(prompt, str):
        prompt = _transcript(prompt, "prompt") if _is_transcript(prompt) else prompt
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _from_text(prompt, chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise Unusable("one of chosen and rejected is text, the other a conversation")
    return _from_turns(prompt, chosen, rejected)


def _from_text(prompt, chosen: str, rejected: str):
    if not chosen.strip() or not rejected.strip():
        raise Unusable("an empty answer")
    if _is_transcript(chosen) or _is_transcript(rejected):
        sides = [_transcript(side, "answer") for side in (chosen, rejected)]
        return _from_turns(prompt, *sides)
    if prompt is None:
        prompt, chosen, rejected = _shared_text(chosen, rejected)
    answers = [[{"role": "assistant", "content": side}] for side in (chosen, rejected)]
    return _as_turns(prompt), *answers


def _from_turns(prompt, chosen: Turns, rejected: Turns):
    opens = {side[0]["role"] for side in (chosen, rejected)}
    if prompt is not None and opens == {"assistant"}:
        return _as_turns(prompt), chosen, rejected
    split = _shared_turns(chosen, rejected)
    if isinstance(prompt, list):
        agrees = chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        split = len(prompt)
    else:
        said = [message["content"].strip() for message in chosen[:split]]
        agrees = prompt is None or prompt.strip() in said
    if not agrees:
        raise Unusable("'prompt' is not what chosen and rejected start with")
    return chosen[:split], chosen[split:], rejected[split:]


def _shared_turns(chosen: Turns, rejected: Turns) -> int:
    """Number of turns in the shared prompt; each side keeps at least its last turn."""
    most = min(len(chosen), len(rejected)) - 1
    split = next((turn for turn in range(most) if chosen[turn] != rejected[turn]), most)
    if split == 0:
        raise Unusable("chosen and rejected share no prompt")
    if {chosen[split]["role"], rejected[split]["role"]} != {"assistant"}:
        raise Unusable("chosen and rejected do not part at a turn of the assistant")
    return split


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Plain text without a prompt: the shared start, up to its last white space, is the prompt."""
    shared = commonprefix([chosen, rejected])
    cut = len(shared) if shared[-1:].isspace() else max(shared.rfind(" "), shared.rfind("\n")) + 1
    if not shared[:cut].strip():
        raise Unusable("chosen and rejected share no prompt")
    return shared[:cut].strip(), chosen[cut:], rejected[cut:]


def _as_turns(prompt: str | Turns) -> Turns:
    if isinstance(prompt, list):
        return prompt
    if not prompt.strip():
        raise Unusable("'prompt' is empty")
    return [{"role": "user", "content": prompt}]


def _is_transcript(text: str) -> bool:
    start = SPEAKER.match(text)
    return start is not None and "\n\nAssistant:" in text


def _transcript(text: str, what: str) -> Turns:
    """The turns of a transcript; a prompt may end with the bare words «Assistant:»."""
    start, *parts = SPEAKER.split(text)
    if start or not parts:
        raise Unusable("a transcript that does not start with 'Human:' or 'Assistant:'")
    turns = [
        {"role": SPEAKERS[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if what == "prompt" and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    if what == "answer" and turns[-1]["role"] != "assistant":
        raise Unusable("a transcript that does not end with the assistant")
    return turns
