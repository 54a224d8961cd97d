"""XLM-R's id layout: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, pieces from 4, `<mask>` last."""

BOS, PAD, EOS, UNK, FIRST_PIECE = 0, 1, 2, 3, 4
FIRST_POSITION = PAD + 1  # positions of a sequence start here; padding has its own, below
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
