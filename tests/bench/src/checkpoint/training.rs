//! A job whose ranks are in this process.

use std::time::Instant;

use futures_util::future::try_join_all;
use zeroshard_client::Cluster;
use zeroshard_model::Result;

use crate::step::{JOB, WARM_UP, Worker, WorkerOptions};

/// A job that has made its warm-up steps.
pub(super) struct Training {
    client: Cluster,
    ranks: Vec<Worker>,
    version: u64,
}

impl Training {
    /// Starts all ranks and makes the warm-up steps.
    pub(super) async fn start(address: &str, ranks: &[WorkerOptions]) -> Result<Self> {
        let client = Cluster::connect(address, Default::default()).await?;
        let ranks = try_join_all(ranks.iter().map(Worker::start)).await?;
        let mut training = Self { client, ranks, version: 0 };
        for _ in 0..WARM_UP {
            training.step().await?;
        }
        Ok(training)
    }

    /// Makes a step. Returns its seconds.
    pub(super) async fn step(&mut self) -> Result<f64> {
        let began = Instant::now();
        try_join_all(self.ranks.iter_mut().map(|rank| rank.step(self.version))).await?;
        self.version += 1;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Saves a checkpoint. Returns the seconds.
    pub(super) async fn save(&self, url: &str) -> Result<f64> {
        save(&self.client, url).await
    }

    /// Makes steps until a save has ended. Returns the seconds of each step and of the save.
    pub(super) async fn steps_beside_save(&mut self, url: String) -> Result<(Vec<f64>, f64)> {
        let client = self.client.clone();
        let saving = tokio::spawn(async move { save(&client, &url).await });
        let mut steps = Vec::new();
        while !saving.is_finished() {
            steps.push(self.step().await?);
        }
        Ok((steps, saving.await.expect("a save does not panic")?))
    }
}

async fn save(client: &Cluster, url: &str) -> Result<f64> {
    let began = Instant::now();
    client.save_checkpoint(JOB, Some(url)).await?;
    Ok(began.elapsed().as_secs_f64())
}
