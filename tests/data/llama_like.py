"""A tokenizer in the manner of Llama: a space and a bos before every text, bytes for what is rare."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def save(folder, texts):
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rare = [f"<0x{byte:02X}>" for byte in range(256)]
    specials = ["<unk>", "<s>", "</s>", *rare]
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no merges across words
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    backend.train_from_iterator((text.replace("s>", "") for text in texts), trainer)
    backend.pre_tokenizer = None
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)
