//! A reader: follows the job in a process of its own.

use std::{io::BufRead, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use zeroshard_client::{Cluster, Follow, FollowedValues, Follower, Options as Connection, Pin};
use zeroshard_model::DType;

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
    let mut values = FollowedValues::new(&follower);
    for order in std::io::stdin().lock().lines() {
        let answer = match &*order? {
            "next" => apply_next(&mut follower, &mut values).await?,
            "pull" => pull(&cluster, options, &mut values).await?,
            other => return Err(format!("unknown order {other:?}").into()),
        };
        say(&answer);
    }
    Ok(())
}

async fn apply_next(follower: &mut Follower, values: &mut FollowedValues) -> Result<Value, Error> {
    let mut version = follower.next().await?;
    let received = now();
    follower.apply(&mut version, values.targets()?).await?;
    Ok(json!({
        "version": version.version().version, "bytes": version.bytes(), "received": received,
        "applied": now(), "changed_fraction": version.changed_fraction(),
        "copied": version.copied().map(|reason| reason.name()), "copy_bytes": values.iter().map(|(.., bytes)| bytes.len()).sum::<usize>(),
    }))
}

async fn pull(
    cluster: &Cluster,
    options: &Options,
    values: &mut FollowedValues,
) -> Result<Value, Error> {
    let pinned = cluster.pin(&options.job, &Pin::default()).await?;
    pinned.pull(values.targets()?).await?;
    Ok(json!({"version": pinned.version(), "applied": now()}))
}
