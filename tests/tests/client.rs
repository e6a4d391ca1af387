//! Compile-time properties of the client crate on which programs may rely.

use zeroshard_client::{Cluster, Commit, Job, Options};
use zeroshard_model::{JobSpec, Result};

fn is_send<T: Send>(_: &T) {}

/// This function is not called; the test is that it compiles.
#[expect(dead_code, reason = "checked by the compiler")]
async fn every_operation_can_be_spawned(cluster: Cluster, job: Job, spec: JobSpec) -> Result<()> {
    is_send(&Cluster::connect("", Options::default()));
    is_send(&cluster.status());
    is_send(&cluster.create_job(&spec));
    is_send(&cluster.describe_job(""));
    is_send(&cluster.delete_job(""));
    is_send(&cluster.state_hash(""));
    is_send(&cluster.join("", 0));
    is_send(&job.initialise(vec![]));
    let attempt = job.attempt(0)?;
    is_send(&attempt.push(vec![]));
    is_send(&job.pull(0, vec![]));
    is_send(&attempt.commit(Commit::default()));
    is_send(&job.state_hash(0));
    let leave = job.leave();
    is_send(&leave);
    leave.await
}
