"""Torch maths: the model, its cut into stages, one stage's weights and sums, and the reference for all of it.

gpt.py                 the decoder and its cut into stages
audit_model.py         the audit model, whose weights count microbatches
custom.py, graph/      custom models: traced as a graph of operators, cut and pinned
stage_io.py            what enters each stage; stage_function.py what a stage makes of it
layout.py              where each weight lies in a stage's flat vector
seeded_random.py       initial weights and dropout: functions of names
fixed_point.py         sums that do not depend on their order; same_bits.py threads and alignment
optimizer.py           AdamW and SGD on flat vectors
stage.py               the path of a microbatch through a stage, and of a step, with
                       boundary.py (bytes <-> tensors), gradient_sum.py and state.py
reductions.py          norms and digests of vectors
reference.py           the same run in a single process
full_model.py          a custom model as one module
evaluate.py            the loss of given weights; generate.py text from them
"""
