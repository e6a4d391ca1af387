"""``zeroshard.report`` and the line at the beginning of a training, of a Paddle model."""

from __future__ import annotations

import logging

import paddle
import pytest
import zeroshard as zs
from zeroshard.paddle import group_sharded_parallel


def test_a_paddle_model_has_a_report_and_a_line(
    cluster: zs.Session, caplog: pytest.LogCaptureFixture
) -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(20, 30), paddle.nn.Linear(30, 2))
    adam = paddle.optimizer.AdamW(parameters=model.parameters())
    with caplog.at_level(logging.INFO, "zeroshard"):
        model, optimizer, _ = group_sharded_parallel(
            model, adam, "p_g_os", segment_size=500, accumulation_steps=1
        )
    (message,) = caplog.messages
    assert "level p_g_os: 692 parameters on 1 shard server; each worker keeps 92 of them" in message
    fresh = zs.report(model)
    for _ in range(2):
        model(paddle.ones([4, 20])).mean().backward()
        assert zs.report(optimizer).gradient_bytes == 0
        optimizer.step()
        optimizer.clear_grad()
    report = zs.report(model)
    assert (report.job, report.level, report.steps) == (fresh.job, "p_g_os", 2)
    assert report.pushed_bytes - fresh.pushed_bytes == 2 * 4 * 692
    assert report.peak_gathered_bytes == 4 * 600 and report.waited["commit"] > 0
    assert "this worker" in str(report) and zs.report(optimizer).job == report.job
