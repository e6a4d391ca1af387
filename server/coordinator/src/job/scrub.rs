//! Servers of a slice compare its content from time to time ([`JobSpec::compare_every`]): each
//! sends a hash, and the job fails if they differ, since no one knows which server is right.
//!
//! [`JobSpec::compare_every`]: zeroshard_model::JobSpec::compare_every

use crate::{
    cluster::context::Context,
    job::{Job, Phase},
    vocabulary::ids::ServerId,
};

impl Job {
    /// A server has sent the hashes of its slices at a version, which was decided in an epoch.
    pub(crate) fn hashes(
        &mut self,
        server: ServerId,
        (decided_in, version): (u64, u64),
        slices: &[(u32, u64)],
        cx: &mut Context<'_>,
    ) {
        let Self { spec, epoch, phase: Phase::Open(open), .. } = self else { return };
        // The job may have been restored since, or may have other servers.
        if decided_in != *epoch {
            return;
        }
        let known = spec.manifest.slices().len() as u32;
        let slices: Vec<(u32, u64)> =
            slices.iter().copied().filter(|&(slice, _)| slice < known).collect();
        let Some((slice, other)) = open.scrub.add(server, version, &slices) else { return };
        let of = spec.manifest.slices()[slice as usize];
        let tensor = &spec.manifest.tensors()[of.tensor].name;
        let end = of.offset + of.numel;
        let range = format!("elements {} to {} of tensor {tensor:?}", of.offset, end - 1);
        let equal = version.saturating_sub(spec.compare_every);
        let [one, other] = [server, other].map(|id| cx.name(id));
        let reason = format!(
            "{one} and {other} have different content of slice {slice} ({range}) at version \
             {version}; the memory of one of them is damaged: test it, delete the job, remove its \
             checkpoints after version {equal}, and continue from an earlier one"
        );
        self.fail(&reason, cx);
        if let Phase::Failed { is_damaged, .. } = &mut self.phase {
            *is_damaged = true;
        }
    }
}
