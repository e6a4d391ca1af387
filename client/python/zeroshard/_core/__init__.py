"""The part of sharding that is the same in every framework: jobs of models, gradients, and
parameters that are gathered when they are used.

Nothing here imports PyTorch or Paddle. The interface to them is
:class:`~zeroshard._core.framework.Framework`, which joins an interface for each subject.
"""
