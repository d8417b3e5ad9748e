"""What tests share.

* `bodies`: tiny random bodies of language models by transformers' own classes, one for every kind of layer that a `Stack` describes.
* `cases`: tiny models of transformers that draw pictures, and calls of their `generate` that ask for one.
* `checkpoints`: tiny checkpoints in the layouts that others publish, with weights that a formula gives.
* `classifiers`: a classifier with random weights, small enough to be made in a moment, and pictures for it.
* `commands`: fixtures: commands of lanternpp and of recipes/nature, run in this process, and how they ended.
* `documents`: the project's Markdown pages, and what is in them.
* `drafts`: what the tree of a draft promises.
* `families`: tiny random checkpoints in the layouts of published models, written by transformers' own classes.
* `hub`: a stand-in for the hub on this machine: repositories are folders, and every request is written down.
* `killed`: processes that may be killed, or that train together, on a tiny model: states after every step, shards of a few pictures.
* `latents`: tiny targets over latents, drafters that know nothing of them, and the distance between two samples of pictures.
* `distributions`: the distributions the library must follow, written a second time, in plain Python, from the papers alone; and every draft
  of a small chain or tree, with the distribution that verifying all of them has.
* `models`: model folders with random weights, small enough to be made in a moment; what is in a folder, and changes of its JSON.
* `photos`: fixtures: captioned pictures, random codes, and a tokenizer for them.
* `processes`: processes that a test started, to kill some of them.
* `relaxed`: relaxed rules, and over three to five codes what they do, which is then small enough to enumerate.
* `served`: for tests of the server: a real one in this process, and a pipeline whose steps wait to be allowed.
* `stages`: the stages of recipes/nature and a drafter's training at toy size, a few steps each.
* `stacks`: passes of a `Stack` by plain PyTorch operations, in the dtype of their inputs: what kernels are compared with.
* `fake_cuda`: a CUDA device without a GPU, on which every operation of a step is watched.
* `ranks`: processes that draw together with their shares of tiny models.
* `refusals`: what is refused, in one sentence.
* `steps`: the parts of an engine of toys, for steps of every proposer, rule and verifier.
* `toys`: small stand-ins with the interfaces of the real thing: targets, drafters, and engines of them.
"""
