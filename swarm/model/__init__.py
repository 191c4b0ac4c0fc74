"""Torch maths: the model, its cut into stages, one stage's weights and sums, and the reference for all of it.

gpt.py        the decoder and its cut into stages
crossings.py  what enters each stage; body.py what a stage makes of it
counting.py   the audit model, whose weights count microbatches
draws.py      initial weights and dropout: functions of names
opgraph.py    any model as a graph of operators; graph.py makes it, pieces.py its stages
brought.py    a user's model as a manifest names and pins it; bring.py builds it
work.py       what operators do; cost.py and memory.py what they take on a device; split.py where to cut
optimizer.py  AdamW and SGD on flat vectors
stage.py      what a stage peer computes
reference.py  the same run in a single process
chained.py    its stages one after another: the decoder's, or the pieces of a brought model
generate.py   text from trained weights
"""
