"""Texts around a caption, with which the weights of a pipeline were trained; an encoder selects one by `prompt=NAME`.

    caption -- clean --> words -- before + words + after, or a chat template --> text -- encoder --> tokens

Source: diffusers 0.38, `encode_prompt` of the pipelines. The English sentences are inputs of the published weights.
"""

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Optional

Chat = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The text around a caption.

    Attributes:
        before, after: text around the caption.
        picture: text after `before` that stands for a picture to edit, if the encoder reads it; empty if it does not.
            With `{}` for the number of the picture, the encoder reads several.
        picture_area: pixels to which a picture is scaled.
        chat: returns the conversation that the tokenizer's chat template converts to a text; None for no template.
        template: arguments of the chat template.
        dropped: rows to remove from the embedding, from the number of tokens in `before`.
        negative: name of the prompt of the empty caption and of negative prompts; None for this one.
        may_be_empty: a caption whose text is empty has an embedding without rows.
    """

    clean: Callable[[str], str] = str
    before: str = ""
    picture: str = ""
    picture_area: int = 0
    after: str = ""
    chat: Optional[Callable[[str], Chat]] = None
    template: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    dropped: Callable[[int], slice] = lambda tokens: slice(0, 0)
    negative: Optional[str] = None
    may_be_empty: bool = False

    def render(self, caption: str, tokenizer: Any, *, pictures: int = 0) -> str:
        """Return the text of a caption; the encoder reads `pictures` pictures with it.

        Raises:
            ValueError: the tokenizer has no chat template, or the prompt reads fewer pictures.
        """
        words = self.clean(caption)
        if self.chat is not None:
            text: str = tokenizer.apply_chat_template(self.chat(words), tokenize=False, **self.template)
            return text
        if pictures > 1 and "{}" not in self.picture:
            raise ValueError(f"this prompt reads one picture, not {pictures}; use prompt=qwen_image_edit_plus")
        before = self.before + "".join(self.picture.format(i + 1) for i in range(pictures))
        return words if self.negative and not caption else before + words + self.after


def _lower_case(caption: str) -> str:
    return caption.lower().strip()


def _clean_html(caption: str) -> str:
    """Replace HTML entities and join white space; ftfy repairs the encoding, if it is installed, as in the pipeline."""
    if find_spec("ftfy") is not None:
        caption = import_module("ftfy").fix_text(caption)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


def _shown_texts(caption: str) -> str:
    shown = dict.fromkeys(straight or curly for straight, curly in re.findall('"(.*?)"|“(.*?)”', caption))
    return "".join(f'Text "{text}". ' for text in shown)


def _of_user(words: str) -> Chat:
    return [{"role": "user", "content": words}]


def _of_flux2(words: str) -> Chat:
    contents = {"system": FLUX2_SYSTEM, "user": words.replace("[IMG]", "")}
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in contents.items()]


def _of_hunyuan_video(words: str) -> Chat:
    system = (" " * 9).join(HUNYUAN_VIDEO_SYSTEM)
    return [{"role": "system", "content": system}, {"role": "user", "content": words or " "}]


FLUX2_SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
QWEN_IMAGE_SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
QWEN_IMAGE_EDIT_SYSTEM = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
PICTURE_MARK = "<|image_pad|>"
HUNYUAN_VIDEO_SYSTEM = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
LUMINA2_SYSTEM = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
SANA_INSTRUCTION = (
    "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for image "
    "generation. Evaluate the level of detail in the user prompt:",
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
    "relationships to create vivid and concrete scenes.",
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.",
    "Here are examples of how to transform or refine prompts:",
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
    "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
    "skyscrapers.",
    "Please generate only the enhanced description for the prompt below and avoid including any additional commentary "
    "or evaluations:",
    "User Prompt: ",
)

_PICTURE = f"<|vision_start|>{PICTURE_MARK}<|vision_end|>"
_QWEN_IMAGE_EDIT = Prompt(
    before=f"<|im_start|>system\n{QWEN_IMAGE_EDIT_SYSTEM}<|im_end|>\n<|im_start|>user\n",
    picture=_PICTURE,
    picture_area=1024 * 1024,
    after="<|im_end|>\n<|im_start|>assistant\n",
    dropped=lambda tokens: slice(0, 64),  # the tokens of `before` in Qwen's vocabulary
)

PROMPTS = {
    "plain": Prompt(),
    "lower_case": Prompt(clean=_lower_case),
    "wan": Prompt(clean=_clean_html),
    "chat": Prompt(chat=_of_user, template={"add_generation_prompt": True, "enable_thinking": False}),
    "chat_thinking": Prompt(chat=_of_user, template={"add_generation_prompt": True, "enable_thinking": True}),
    "flux2": Prompt(chat=_of_flux2, template={"add_generation_prompt": False}),
    "qwen_image": Prompt(
        before=f"<|im_start|>system\n{QWEN_IMAGE_SYSTEM}<|im_end|>\n<|im_start|>user\n",
        after="<|im_end|>\n<|im_start|>assistant\n",
        dropped=lambda tokens: slice(0, 34),  # the tokens of `before` in Qwen's vocabulary
    ),
    "qwen_image_edit": _QWEN_IMAGE_EDIT,
    "qwen_image_edit_plus": replace(_QWEN_IMAGE_EDIT, picture=f"Picture {{}}: {_PICTURE}", picture_area=384 * 384),
    "hunyuan_video": Prompt(
        chat=_of_hunyuan_video,
        template={"add_generation_prompt": True},
        dropped=lambda tokens: slice(0, 108),  # the tokens before the caption in Qwen's vocabulary
    ),
    "shown_texts": Prompt(clean=_shown_texts, may_be_empty=True),
    "lumina2": Prompt(before=f"{LUMINA2_SYSTEM} <Prompt Start> ", negative="plain"),
    "sana": Prompt(
        clean=_lower_case,
        before="\n".join(SANA_INSTRUCTION),
        dropped=lambda tokens: slice(1, tokens - 1),  # keeps the start token and the last token of the instruction
        negative="lower_case",
    ),
}
"""By the name of the option `prompt`."""
