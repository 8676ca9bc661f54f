"""Small tokenizers made here: one Llama-3-like that wants to add BOS twice, one Qwen-like."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from xsparse.tasks.haystack import NOISE
from xsparse.tasks.words import data_lines

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
    "<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Like Qwen3 with thinking on by default, and like templates that print the date of today.
QWEN_TEMPLATE = (
    "<|im_start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)

WORDING = [
    "A special magic number is hidden somewhere in the following text. Remember it well: a question"
    " about it comes at the end. The special magic numbers for the key given in the text above are",
    "Variables are assigned somewhere in the following text, some of them from one another. Follow"
    " how a value is handed on. Question: Which variables in the text above have the value?",
    "The numbered list below repeats its words, some of them more often than the others. Keep in"
    " mind which words are repeated most. One of the special magic uuids for it is: Answer:",
]


def train(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [*data_lines("essay.txt"), *data_lines("words.txt"), *NOISE, *WORDING * 50], trainer
    )
    return tokenizer


@pytest.fixture(scope="session")
def llama():
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = train(special)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        additional_special_tokens=special[2:],
        chat_template=LLAMA_TEMPLATE,
    )


@pytest.fixture(scope="session")
def qwen():
    special = ["<|im_start|>", "<|im_end|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=train(special),
        eos_token="<|im_end|>",
        additional_special_tokens=special[:1],
        chat_template=QWEN_TEMPLATE,
    )


@pytest.fixture(params=["llama", "qwen"])
def tokenizer(request):
    return request.getfixturevalue(request.param)
