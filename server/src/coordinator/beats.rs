//! Shows at the places of checkpoints that their jobs live, so that no other job takes the places.
//!
//! Each place has a task of its own, and at most one at a time: a place that does not answer delays
//! neither the others nor the coordinator.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use futures_util::{StreamExt, stream};
use tokio::task::JoinHandle;
use zeroshard_checkpoint::{BEAT, Storage};
use zeroshard_coordinator::{cluster::Cluster, job::Job, vocabulary::ids::JobRef};
use zeroshard_model::{Error, Result};

use super::driver::Driver;
use crate::identity;

/// The number of files that are written at a place at the same time.
const WRITES: usize = 32;

/// Beats for all jobs that the coordinator leads. Never returns.
pub(super) async fn run(driver: Arc<Driver>) {
    let mut places: HashMap<String, JoinHandle<Option<Storage>>> = HashMap::new();
    loop {
        tokio::time::sleep(BEAT).await;
        let read = |cluster: &Cluster| -> Vec<_> {
            cluster.jobs().values().filter_map(Job::claims).collect()
        };
        let Ok(claims) = driver.read(read) else { continue };
        let mut jobs: BTreeMap<String, Vec<JobRef>> = BTreeMap::new();
        for (job, urls) in claims {
            for url in urls {
                jobs.entry(url).or_default().push(job.clone());
            }
        }
        places.retain(|url, beat| jobs.contains_key(url) || !beat.is_finished());
        for (url, jobs) in jobs {
            let open = match places.remove(&url) {
                Some(beat) if !beat.is_finished() => {
                    places.insert(url, beat);
                    continue;
                }
                Some(beat) => beat.await.ok().flatten(),
                None => None,
            };
            places.insert(url.clone(), tokio::spawn(beat(url, open, jobs)));
        }
    }
}

/// Beats for the jobs at one place. Returns the storage for the next time.
async fn beat(url: String, open: Option<Storage>, jobs: Vec<JobRef>) -> Option<Storage> {
    let beat = async {
        let storage = match open {
            Some(storage) => storage,
            None => match found(url.clone()).await? {
                Some(storage) => storage,
                None => return Ok(None), // somebody has removed it
            },
        };
        let sign = identity::random()?;
        let beats = jobs.into_iter().map(|JobRef { name, id }| {
            let storage = storage.clone();
            async move { storage.beat(&name, id, sign).await }
        });
        let results: Vec<_> = stream::iter(beats).buffer_unordered(WRITES).collect().await;
        results.into_iter().collect::<Result<()>>()?;
        Ok::<_, Error>(Some(storage))
    };
    // If the place fails for long, another job may take it over, and then saves fail as well.
    beat.await
        .inspect_err(|error| tracing::warn!(url, %error, "jobs could not show that they live"))
        .ok()
        .flatten()
}

/// Opens a bucket, or a directory if it exists, which may block.
async fn found(url: String) -> Result<Option<Storage>> {
    let open = tokio::task::spawn_blocking(move || Storage::open_existing(&url));
    open.await.unwrap_or_else(|error| Err(Error::Internal { cause: error.to_string() }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[tokio::test]
    async fn a_place_that_somebody_has_removed_does_not_come_back_and_gets_no_beat() {
        let parent = tempfile::tempdir().unwrap();
        let place = parent.path().join("checkpoints");
        let url = format!("file://{}", place.display());
        let jobs = vec![JobRef { name: "job".to_owned(), id: 7 }];
        assert!(beat(url.clone(), None, jobs.clone()).await.is_none());
        assert!(!place.exists());
        let open = Storage::open(&url).unwrap();
        std::fs::remove_dir(&place).unwrap();
        beat(url, Some(open), jobs).await.unwrap();
        assert!(!place.exists());
    }
}
