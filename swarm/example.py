"""The manifest that `swarm manifest` prints, to copy and change."""

EXAMPLE = """\
# A run: everything that decides the weights. Its id is the hash of these values, not of this text.

name = "example"
seed = 1
steps = 1000
dtype = "float32"           # or "bfloat16" (autocast), "float64" (proofs)
delayed_updates = false     # true: averaging overlaps the next step, gradients are one step old
exact_sums = true           # false: floats are added; the result depends on who computed what, by a last bit
checkpoint_every = 100      # steps; 0 = never
rebalance_every_s = 60      # seconds between decisions on who moves to a slower stage; 0 = nobody moves

[model]
preset = "10M"              # or another row of docs/manifest.md: layers, hidden, heads, ffn_hidden, ...
stages = 3                  # pieces the model is cut into
# dropout = 0.0             # a key beside the preset wins over it
# A model of your own instead: stages, vocab_size, and
# kind = "code"             # source = "package.module:function", installed on every peer
# kind = "hf"               # config = '{"model_type":"gpt2","n_layer":4}', of transformers

[data]
source = "tales"            # little ones, which every machine makes; "files": your text, given with --data
                            # or "code": code = "package.module:function"
tokenizer = "bytes"         # or "file": a `tokenizers` JSON
sequence_length = 256       # tokens per sample
# sha256, tokens            # filled in when the run is published

[batch]
microbatch_size = 8         # samples
microbatches_per_step = 16
# microbatch_threads = 1    # CPU threads that share one microbatch; a peer's other cores compute others

[optimizer]
name = "adamw"              # or "sgd", "adamw8bit" (CUDA), "muon" with muon = ["layers.*"]
lr = 0.001
warmup_steps = 20
schedule = "cosine"         # or "constant", "linear", "inverse_sqrt", "wsd"
min_lr_ratio = 0.1
weight_decay = 0.1
clip_norm = 1.0             # 0 = off

[codec]                     # none, bf16, blockwise8, or topk:0.05 (+bf16, +blockwise8): the largest 5 %
forward = "blockwise8"      # activations; or a list, one for each boundary between stages
backward = "blockwise8"     # their gradients
reduce = "none"             # weight gradients; "rounded16", "rounded8": half and a quarter of the bytes
# adaptive = ["topk:0.1+blockwise8"]  # what slow lines may use instead: the result then depends on routes

# [eval]                    # held-out text, given with --eval-data, on the way
# every = 100               # steps
# samples = 64

# [islands]                 # they train apart and meet now and then: for slow lines, at a price in loss
# count = 2                 # divides microbatches_per_step
# local_steps = 49          # between two meetings; steps, checkpoint_every and eval.every: multiples of 50
# warmup_steps = 8          # after a meeting, in which the learning rate rises again

[admission]
owner = ""                  # peer id that signs the manifest; "" = its hash is enough
trainers = []               # peer ids; [] = anyone
# founders = []             # peer ids whose word counts from the start, before that of others
"""
