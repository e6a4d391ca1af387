//! A reader: follows the job in a process of its own.

use std::{collections::BTreeMap, io::BufRead, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use zeroshard_client::{Cluster, Follow, Follower, Options as Connection, Pin, Slots, Target};
use zeroshard_model::{DType, TensorId};

use super::now;
use crate::{Error, talk::say};

/// How long a reader waits for a version.
const WAIT: Duration = Duration::from_secs(600);

/// A reader of `follow` (used by `follow` itself)
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[arg(long)]
    address: String,
    #[arg(long)]
    job: String,
    #[arg(long)]
    dtype: DType,
    #[arg(long)]
    mirror: Option<String>,
}

/// Arrays for all tensors.
struct Arrays(BTreeMap<usize, (DType, Vec<u8>)>);

impl Arrays {
    fn new(follower: &Follower) -> Result<Self, Error> {
        let tensors = follower.tensors()?.into_iter().map(|tensor| {
            let numel = follower.spec().manifest.tensors()[tensor].numel() as usize;
            let dtype = follower.dtype_of(tensor);
            (tensor, (dtype, vec![0; numel * dtype.size()]))
        });
        Ok(Self(tensors.collect()))
    }

    fn targets(&mut self) -> Result<Vec<Target<'_>>, Error> {
        let mut targets = Vec::with_capacity(self.0.len());
        for (&tensor, (dtype, data)) in &mut self.0 {
            let data = Slots::new(&mut data[..], *dtype)?;
            targets.push(Target { tensor: TensorId::new(tensor), bounds: None, data });
        }
        Ok(targets)
    }

    fn bytes(&self) -> usize {
        self.0.values().map(|(_, data)| data.len()).sum()
    }
}

/// Answers each line of standard input: `next` applies the next version, and `pull` fetches all
/// values of the newest version without following it.
pub(crate) fn run(options: &Options) -> Result<(), Error> {
    tokio::runtime::Runtime::new()?.block_on(read(options))
}

async fn read(options: &Options) -> Result<(), Error> {
    let cluster = Cluster::connect(&options.address, Connection::default()).await?;
    let (dtype, mirror) = (options.dtype, options.mirror.clone());
    let follow = Follow { dtype, wait: WAIT, mirror, ..Follow::default() };
    let mut follower = cluster.follow(&options.job, follow).await?;
    let mut arrays = Arrays::new(&follower)?;
    for order in std::io::stdin().lock().lines() {
        let answer = match &*order? {
            "next" => apply_next(&mut follower, &mut arrays).await?,
            "pull" => pull(&cluster, options, &mut arrays).await?,
            other => return Err(format!("unknown order {other:?}").into()),
        };
        say(&answer);
    }
    Ok(())
}

async fn apply_next(follower: &mut Follower, arrays: &mut Arrays) -> Result<Value, Error> {
    let mut version = follower.next().await?;
    let received = now();
    follower.apply(&mut version, arrays.targets()?).await?;
    Ok(json!({
        "version": version.version().version, "bytes": version.bytes(), "received": received,
        "applied": now(), "changed_fraction": version.changed_fraction(),
        "copied": version.copied().map(|reason| reason.name()), "copy_bytes": arrays.bytes(),
    }))
}

async fn pull(cluster: &Cluster, options: &Options, arrays: &mut Arrays) -> Result<Value, Error> {
    let pinned = cluster.pin(&options.job, &Pin::default()).await?;
    pinned.pull(arrays.targets()?).await?;
    Ok(json!({"version": pinned.version(), "applied": now()}))
}
