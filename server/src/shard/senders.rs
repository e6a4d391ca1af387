//! Who may send what of a slice, and the refusal of who may not.

use zeroshard_proto::{DimPlacement, Error, JobSpec, Result};

use super::lane::Lane;
use crate::listing::some_of;

/// What is sent of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// A gradient: by every rank of a lane.
    Gradient,
    /// What the job begins with: by the first one.
    Start,
    /// A buffer's next content: likewise.
    Buffer,
}

/// The lane that `rank` sends something to, of the `lanes` of slice number `index`.
///
/// # Errors
/// [`Error::Invalid`] if there is none, saying why, and who does.
pub(crate) fn lane_of<'a>(
    spec: &JobSpec,
    index: u32,
    lanes: &'a [Lane],
    rank: u32,
    sent: Sent,
) -> Result<&'a Lane> {
    let may = |lane: &&Lane| match sent {
        Sent::Gradient => lane.position(rank).is_some(),
        Sent::Start | Sent::Buffer => lane.uploader() == rank,
    };
    lanes.iter().find(may).ok_or_else(|| refusal(spec, index, lanes, rank, sent))
}

fn refusal(spec: &JobSpec, index: u32, lanes: &[Lane], rank: u32, sent: Sent) -> Error {
    let tensor = spec.manifest.slices()[index as usize].tensor;
    let name = &spec.manifest.tensors()[tensor].name;
    let (what, does) = match sent {
        Sent::Gradient => ("pushes the gradient of tensor", "contributes to"),
        Sent::Start => ("uploads tensor", "uploads some of"),
        Sent::Buffer => ("pushes buffer", "uploads some of"),
    };
    let mut ranks: Vec<u32> = match sent {
        Sent::Gradient => lanes.iter().flat_map(|lane| lane.ranks.iter().copied()).collect(),
        Sent::Start | Sent::Buffer => lanes.iter().map(Lane::uploader).collect(),
    };
    ranks.sort_unstable();
    let who = some_of(ranks.into_iter().map(|rank| describe(spec, tensor, rank)));
    Error::invalid(
        format!("rank that {what} {name:?}"),
        format!("{}, {}", describe(spec, tensor, rank), reason(spec, tensor, lanes, rank)),
        format!("one that {does} slice {index}: {who}"),
    )
}

/// "rank 3 (dp 1, tp 1)": where the rank is in the tensor's mesh; else in another one.
pub(crate) fn describe(spec: &JobSpec, tensor: usize, rank: u32) -> String {
    let layout = spec.layout_of(tensor).filter(|layout| layout.mesh().ranks().contains(&rank));
    layout.map_or_else(|| spec.describe_rank(rank), |layout| layout.mesh().describe(rank))
}

/// Why a rank sends nothing.
fn reason(spec: &JobSpec, tensor: usize, lanes: &[Lane], rank: u32) -> String {
    if lanes.iter().any(|lane| lane.position(rank).is_some()) {
        return "which is not the first that has it".to_owned();
    }
    let layout = spec.layout_of(tensor);
    let place = layout.and_then(|layout| Some((layout.mesh().coordinate(rank)?, layout)));
    let Some((coordinate, layout)) = place else {
        return "which is not in the tensor's mesh".to_owned();
    };
    let mut dims = layout.placements().iter().zip(coordinate).zip(layout.mesh().names());
    let repeated =
        dims.find(|((placement, place), _)| **placement == DimPlacement::Replicate && *place > 0);
    if let Some((_, dim)) = repeated {
        return format!("where {dim:?} is not 0, and along {dim:?} the tensor is replicated");
    }
    match spec.local_box(tensor, rank).is_empty() {
        true => "whose box of the tensor is empty".to_owned(),
        false => "whose box of the tensor has nothing of this slice".to_owned(),
    }
}

#[cfg(test)]
#[path = "senders_tests.rs"]
mod tests;
