//! The reduced gradient of a step according to the servers' reports: for the decision, and for
//! ranks that request its norm before the decision.

use std::{collections::BTreeMap, sync::Arc};

use zeroshard_model::{JobSpec, Result, TensorSpec, listing::some_of};

use super::{
    context::{Common, Context},
    decisions::Report,
    events::{Action, Caller, Reduce, Reply, ServerId, Waiter},
    leases::check_rank,
    servers::Servers,
    state::{Job, Open, Phase},
};

/// The reduced gradient of one server's slices.
#[derive(Debug, Clone)]
pub struct Reduced {
    /// All trained slices, ascending, with the sum of squares of their summed gradient.
    pub sums: Vec<(u32, f64)>,
    /// The first overflow in manifest order.
    pub overflow: Option<Overflow>,
    /// The slices from which at least one rank is absent, ascending.
    pub absent: Vec<Absent>,
    /// The number of the last copy of which the server has been told; 0 for none.
    pub copies: u64,
}

/// A gradient that contains inf or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    pub slice: u32,
    /// The lowest rank whose gradient contains them; `None` if only the sum over the ranks does.
    pub rank: Option<u32>,
}

/// A slice, or a tensor with this first slice, from which at least one rank is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absent {
    pub slice: u32,
    /// The lowest absent rank; one that takes part in the step, if there is one.
    pub rank: u32,
    /// `true` if all ranks are absent.
    pub everywhere: bool,
}

/// The L2 norm of the mean, unscaled gradient before factors and clipping.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// The norm of all tensors that are clipped; not finite after an overflow.
    pub value: f64,
    /// The first overflow in manifest order.
    pub overflow: Option<Overflow>,
    /// The norm of each tensor; 0 for a tensor without gradient.
    pub tensors: Arc<[f64]>,
}

/// The reduced gradient of all slices.
#[derive(Debug)]
pub(super) struct Gradient {
    /// The sum of squares of the mean gradient of each tensor; 0 for a tensor that does not train.
    sums: Vec<f64>,
    /// The first overflow in manifest order.
    overflow: Option<Overflow>,
    /// One entry for each tensor with absent ranks, in manifest order.
    pub(super) absent: Vec<Absent>,
}

impl Gradient {
    /// Adds the sums in f64: slices to tensors, and tensors to the total, in manifest order, so
    /// that the result does not depend on the distribution of slices over the servers.
    /// `contributes`: whether a rank takes part in the step.
    pub(super) fn new(
        spec: &JobSpec,
        reports: &BTreeMap<ServerId, Reduced>,
        contributes: impl Fn(u32) -> bool,
    ) -> Self {
        let manifest = &spec.manifest;
        let mut sums = vec![0.0f64; manifest.slices().len()];
        for &(slice, sum) in reports.values().flat_map(|report| &report.sums) {
            sums[slice as usize] = sum;
        }
        let of_tensor = |(tensor, spec_of): (usize, &TensorSpec)| {
            if !spec_of.trains() {
                return 0.0;
            }
            let sum = sums[manifest.slices_of(tensor)].iter().fold(0.0, |a, b| a + b);
            let divisor = spec.divisor(tensor) as f64;
            sum / (divisor * divisor)
        };
        let tensors = manifest.tensors().iter().enumerate().map(of_tensor).collect();
        let infinite = sums.iter().position(|sum| !sum.is_finite());
        let infinite = infinite.map(|slice| Overflow { slice: slice as u32, rank: None });
        // The servers' reports have precedence, because they may name the rank.
        let overflows = reports.values().filter_map(|report| report.overflow).chain(infinite);
        Self {
            sums: tensors,
            overflow: overflows.min_by_key(|overflow| overflow.slice),
            absent: absent(spec, reports, contributes),
        }
    }

    /// The norm of the mean gradient of all tensors that are clipped, each multiplied by its
    /// factor.
    pub(super) fn norm_of(&self, spec: &JobSpec, factors: &[f64]) -> f64 {
        let clipped = spec.manifest.tensors().iter().enumerate().filter(|(_, t)| !t.no_clip);
        let squares = clipped.map(|(tensor, _)| {
            let factor = factors.get(tensor).copied().unwrap_or(1.0);
            self.sums[tensor] * (factor * factor)
        });
        squares.fold(0.0, |a, b| a + b).sqrt()
    }

    /// The norm of the mean, unscaled gradient.
    pub(super) fn norm(&self, spec: &JobSpec, loss_scale: f64) -> Norm {
        let (norm, overflow) = (self.norm_of(spec, &[]) / loss_scale, self.overflow);
        // If a rank's gradients overflow, they may still add up to a finite norm, which is
        // meaningless.
        let value = if overflow.is_some() && norm.is_finite() { f64::NAN } else { norm };
        let tensors = self.sums.iter().map(|sum| sum.sqrt() / loss_scale).collect();
        Norm { value, overflow, tensors }
    }
}

/// For each tensor of which at least one rank lacked a part: the lowest such rank, if possible of
/// those that take part in the step, and whether no rank had any of it.
fn absent(
    spec: &JobSpec,
    reports: &BTreeMap<ServerId, Reduced>,
    contributes: impl Fn(u32) -> bool,
) -> Vec<Absent> {
    let order = |rank: u32| (!contributes(rank), rank);
    // By tensor: the lowest rank, and the number of slices without any gradient.
    let mut tensors = BTreeMap::<usize, (u32, usize)>::new();
    for absent in reports.values().flat_map(|report| &report.absent) {
        let tensor = spec.manifest.slices()[absent.slice as usize].tensor;
        let (rank, nowhere) = tensors.entry(tensor).or_insert((absent.rank, 0));
        *rank = std::cmp::min_by_key(absent.rank, *rank, |&rank| order(rank));
        *nowhere += usize::from(absent.everywhere);
    }
    let merged = tensors.into_iter().map(|(tensor, (rank, nowhere))| {
        let slices = spec.manifest.slices_of(tensor);
        Absent { slice: slices.start as u32, rank, everywhere: nowhere == slices.len() }
    });
    merged.collect()
}

/// A call that waits for the gradient's norm.
#[derive(Debug)]
pub(super) struct Reducer {
    pub(super) rank: u32,
    pub(super) waiter: Waiter,
    loss_scale: f64,
}

impl Job {
    pub(super) fn reduce(&mut self, caller: Caller, reduce: Reduce, cx: &mut Context<'_>) {
        match self.try_reduce(caller, &reduce, cx) {
            Ok(None) => self.answer_reducers(cx),
            Ok(Some(reply)) => cx.push(Action::Answer(caller, Ok(reply))),
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Registers the call. Returns the answer if the step was decided.
    fn try_reduce(
        &mut self,
        caller: Caller,
        reduce: &Reduce,
        cx: &mut Context<'_>,
    ) -> Result<Option<Reply>> {
        let Reduce { turn, loss_scale, wait } = reduce;
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(&turn.job.name)?;
        check_rank(&turn.job.name, turn.rank, spec.world)?;
        if let Some(decided) = open.decided(turn.attempt.step) {
            let Report { norm, resting, .. } = &decided.report;
            return Ok(Some(Reply::Reduced(norm.clone(), resting.clone())));
        }
        open.check_turn(turn, open.attempt(*epoch))?;
        let waiter = Waiter::new(caller, cx.now, *wait);
        open.round.reducers.push(Reducer { rank: turn.rank, waiter, loss_scale: *loss_scale });
        Ok(None)
    }

    /// Answers the calls that wait for the norm, if all gradients of the open step are complete.
    pub(super) fn answer_reducers(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        if open.round.reducers.is_empty() || !open.is_reduced() {
            return;
        }
        let gradient = open.gradient(spec);
        for Reducer { waiter, loss_scale, .. } in std::mem::take(&mut open.round.reducers) {
            let norm = gradient.norm(spec, open.scale_of_mean(spec.world, loss_scale));
            let reply = Reply::Reduced(norm, open.resting.ranks().collect());
            cx.answer(waiter, Ok(reply));
        }
    }

    pub(super) fn expire_reducers(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        let late = |reducer: &mut Reducer| reducer.waiter.deadline <= cx.now;
        let expired: Vec<Reducer> = open.round.reducers.extract_if(.., late).collect();
        if expired.is_empty() {
            return;
        }
        let waiting_for = self.gradients_wait_for(cx.common);
        cx.time_out(expired.into_iter().map(|reducer| reducer.waiter), &waiting_for);
    }

    fn gradients_wait_for(&self, common: &Common) -> String {
        let Self { name, id, epoch, phase: Phase::Open(open), .. } = self else {
            return String::new();
        };
        let parts = some_of(late_servers(*id, open, &common.servers));
        format!("the gradients of step {} of job {name:?} (epoch {epoch}): {parts}", open.step())
    }
}

/// Servers without all parameters or gradients, each with the input that it waits for.
pub(super) fn late_servers(job_id: u64, open: &Open, servers: &Servers) -> Vec<String> {
    let uninitialised = open.uninitialised.iter();
    let uninitialised = uninitialised
        .map(|&server| format!("{}, which waits for initial parameters", servers.name(server)));
    let late = open.servers().filter(|&server| open.awaits(server));
    let late = late.filter(|server| !open.round.reports.contains_key(server));
    let late =
        late.map(|server| format!("{}{}", servers.name(server), lacks(server, job_id, servers)));
    uninitialised.chain(late).collect()
}

/// The missing input according to the server's last report.
fn lacks(server: ServerId, job_id: u64, servers: &Servers) -> String {
    let stats = servers.get(server).and_then(|known| known.stats.as_ref());
    match stats.and_then(|stats| stats.waiting_for(job_id)) {
        Some(missing) => format!(", which waits for {missing}"),
        None => ", which has not reported that its gradients are complete".to_owned(),
    }
}

impl Open {
    /// The reduced gradient of the open step.
    pub(super) fn gradient(&self, spec: &JobSpec) -> Gradient {
        Gradient::new(spec, &self.round.reports, |rank| self.takes_part(rank))
    }

    /// Returns whether every server has all gradients of the open step.
    pub(super) fn is_reduced(&self) -> bool {
        let mut awaited = self.servers().filter(|&server| self.awaits(server));
        self.version.is_some() && awaited.all(|server| self.round.reports.contains_key(&server))
    }
}
