//! The extension module of the Python package `zeroshard`: clusters, jobs and transfers. Python
//! code has the hooks into frameworks; transfers, waiting and retries are here and in
//! zeroshard-client. `zeroshard/_native.pyi` describes the interface.

mod array;
mod average;
mod call;
mod checkpoint;
mod cluster;
mod error;
mod exchange;
mod follow;
mod hash;
mod job;
mod mesh;
mod optimizer;
mod pane;
mod pin;
mod plan;
mod progress;
mod report;
mod runtime;
mod spikes;
mod transfer;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use array::{Array, TensorSpec};
    #[pymodule_export]
    use checkpoint::{CheckpointPolicy, user_data};
    #[pymodule_export]
    use cluster::Cluster;
    #[pymodule_export]
    use exchange::Exchange;
    #[pymodule_export]
    use follow::{FollowedVersion, Follower};
    #[pymodule_export]
    use hash::{hashes, looks};
    #[pymodule_export]
    use job::{Job, OpenAttempt};
    #[pymodule_export]
    use mesh::{Layout, Mesh, TensorBox, redistribution};
    #[pymodule_export]
    use optimizer::Optimizer;
    #[pymodule_export]
    use pane::{Pane, own_panes};
    #[pymodule_export]
    use pin::Pinned;
    #[pymodule_export]
    use plan::{Buckets, Schedule};
    #[pymodule_export]
    use report::Report;
    #[pymodule_export]
    use transfer::{Rest, Transfer};

    /// Sends the spans that have ended to the collector of traces, if there is one.
    #[pyfunction]
    fn flush_traces(py: Python<'_>) {
        py.detach(zeroshard_client::trace::flush);
    }

    /// The bytes that a server on this machine may use by default; `None` if the system does not
    /// tell.
    #[pyfunction]
    fn available_memory() -> Option<u64> {
        zeroshard_server::memory::available()
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
