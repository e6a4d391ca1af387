"""What sharding is in any framework: jobs made of models, gradients on their way, parameters that
come and go.

Nothing here knows PyTorch or Paddle; what must be known of them is a
:class:`~zeroshard._core.framework.Framework`.
"""
