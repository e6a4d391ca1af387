"""Integrations with the libraries in which PyTorch models are trained.

Each library is imported only by the module that is named after it:
``zeroshard.integrations.accelerate``, ``zeroshard.integrations.transformers`` and
``zeroshard.integrations.lightning``.
"""
