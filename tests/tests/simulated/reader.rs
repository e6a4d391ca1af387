//! A reader, which follows the job until its last version.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Mutex,
    time::Duration,
};

use zeroshard_client::{
    Cluster, Error, Follow, Follower, Options, Result, Slots, Target, TensorId,
};
use zeroshard_model::DType;

use crate::{
    cluster::{COORDINATOR, Log, Seen},
    worker::STEPS,
};

/// The pause before the reader looks for the job again.
const PAUSE: Duration = Duration::from_millis(100);
/// The pause after some of the versions, in which it misses others.
const SLEEP: Duration = Duration::from_millis(1500);

/// Follows the job to its last version. Records the hash of each version.
pub(crate) async fn follow(dtype: DType, log: &Log, seen: &Mutex<Seen>) -> Result<()> {
    let options = Options::default().timeout(Duration::from_secs(120));
    let client = Cluster::connect(COORDINATOR, options).await?;
    let mut follower = loop {
        match client.follow("job", Follow { dtype, ..Follow::default() }).await {
            Err(Error::UnknownJob { .. }) => tokio::time::sleep(PAUSE).await,
            result => break result?,
        }
    };
    let tensors = follower.tensors().into_iter();
    let mut arrays: BTreeMap<usize, Vec<u8>> = tensors
        .map(|tensor| {
            let numel = follower.spec().manifest.tensors()[tensor].numel() as usize;
            (tensor, vec![0; numel * follower.dtype_of(tensor).size()])
        })
        .collect();
    let mut last = None;
    loop {
        let (version, is_copy) = next(&mut follower, &mut arrays, log).await?;
        assert!(last < Some(version), "version {version} after {last:?}");
        last = Some(version);
        let mut hasher = DefaultHasher::new();
        arrays.hash(&mut hasher);
        {
            let mut seen = seen.lock().unwrap();
            seen.versions.insert(version, hasher.finish());
            seen.changed += u64::from(!is_copy);
        }
        if version == STEPS {
            return Ok(());
        }
        if version % 3 == 1 {
            tokio::time::sleep(SLEEP).await;
        }
    }
}

/// Applies the next version. Returns its number, and whether it was a full copy.
async fn next(
    follower: &mut Follower,
    arrays: &mut BTreeMap<usize, Vec<u8>>,
    log: &Log,
) -> Result<(u64, bool)> {
    let mut version = follower.next().await?;
    let dtypes: Vec<DType> = arrays.keys().map(|&tensor| follower.dtype_of(tensor)).collect();
    let targets = arrays.iter_mut().zip(dtypes).map(|((&tensor, array), dtype)| Target {
        tensor: TensorId::new(tensor),
        bounds: None,
        data: Slots::new(array, dtype).unwrap(),
    });
    follower.apply(&mut version, targets.collect()).await?;
    let (number, copied) = (version.version(), version.copied());
    log.add(turmoil::elapsed(), &format!("reader: version {number}, copied {copied:?}"));
    Ok((number.version, copied.is_some()))
}
