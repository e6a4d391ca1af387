//! The ranks that may send data of a slice.

use zeroshard_model::{
    DimPlacement, Error, JobSpec, Result, TensorSpec, geometry::SliceContributors, listing::some_of,
};

/// Data of a slice that a rank sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// A gradient, from every contributing rank.
    Gradient,
    /// Initial values, from the uploading rank.
    Initial,
    /// New values, from the rank that replaces them.
    Replacement,
}

/// The contributors of slice number `index` for which `rank` sends data.
///
/// # Errors
/// [`Error::Refused`] if `rank` may not send it; the error names the reason and the ranks that may.
pub fn contributors_of<'a>(
    spec: &JobSpec,
    index: u32,
    all: &'a [SliceContributors],
    rank: u32,
    sent: Sent,
) -> Result<&'a SliceContributors> {
    let may = |of: &&SliceContributors| match sent {
        Sent::Gradient => of.ranks.contains(rank),
        Sent::Initial => of.ranks.uploader() == rank,
        Sent::Replacement => of.ranks.replacer() == rank,
    };
    all.iter().find(may).ok_or_else(|| refusal(spec, index, all, rank, sent))
}

fn refusal(spec: &JobSpec, index: u32, all: &[SliceContributors], rank: u32, sent: Sent) -> Error {
    let tensor = spec.manifest.slices()[index as usize].tensor;
    let TensorSpec { name, replaced_by, .. } = &spec.manifest.tensors()[tensor];
    if let Some(only) = replaced_by.filter(|_| sent == Sent::Replacement) {
        let [rank, only] = [rank, only].map(|rank| describe(spec, tensor, rank));
        return Error::refused(format!(
            "{rank} cannot push new values of tensor {name:?}, which only {only} may replace, \
             according to the specification of the job"
        ));
    }
    let (what, does) = match sent {
        Sent::Gradient => ("push the gradient of tensor", "contribute to"),
        Sent::Initial => ("upload tensor", "upload parts of"),
        Sent::Replacement => ("push new values of tensor", "upload parts of"),
    };
    let mut ranks: Vec<u32> = match sent {
        Sent::Gradient => all.iter().flat_map(|of| of.ranks.iter().copied()).collect(),
        Sent::Initial | Sent::Replacement => all.iter().map(|of| of.ranks.uploader()).collect(),
    };
    ranks.sort_unstable();
    let who = some_of(ranks.into_iter().map(|rank| describe(spec, tensor, rank)));
    let (rank, reason) = (describe(spec, tensor, rank), reason(spec, tensor, all, rank));
    Error::refused(format!(
        "{rank}, {reason}, cannot {what} {name:?}; the ranks that {does} slice {index} are: {who}"
    ))
}

/// Describes a rank with its coordinates in the tensor's mesh or, if it is not in that mesh, in
/// another one, such as "rank 3 (dp 1, tp 1)".
pub fn describe(spec: &JobSpec, tensor: usize, rank: u32) -> String {
    let layout = spec.layout_of(tensor).filter(|layout| layout.mesh().ranks().contains(&rank));
    layout.map_or_else(|| spec.describe_rank(rank), |layout| layout.mesh().describe(rank))
}

/// The reason why a rank may not send data.
fn reason(spec: &JobSpec, tensor: usize, all: &[SliceContributors], rank: u32) -> String {
    if all.iter().any(|of| of.ranks.contains(rank)) {
        return "which is not the first rank that holds it".to_owned();
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
        return format!("which is not the first along {dim:?}, where the tensor is replicated");
    }
    match spec.local_box(tensor, rank).is_empty() {
        true => "whose box of the tensor is empty".to_owned(),
        false => "whose box of the tensor does not overlap this slice".to_owned(),
    }
}

#[cfg(test)]
#[path = "senders_tests.rs"]
mod tests;
