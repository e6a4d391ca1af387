//! One step of a worker at each level. The arithmetic is the same at all levels; the lifetimes of
//! parameters and gradients differ.
//!
//! | level | parameters | gradients |
//! |---|---|---|
//! | `os` | all, for the whole step | all are kept and pushed at the end |
//! | `os_g` | all, for the whole step | pushed and freed by segment during the backward pass |
//! | `p_g_os` | those of one segment, while those of the next are being pulled | as at `os_g` |
//!
//! The worker sums the gradients of its micro-batches in f32 and in order, and pushes the sum. So
//! the bits are the same at every level, and with m micro-batches the traffic is `1/m` of that of
//! pushing each gradient. `os` and `os_g` run one micro-batch after the other, which limits the
//! graphs in memory to those of one micro-batch. `p_g_os` runs all micro-batches through a segment
//! before it continues with the next segment. It keeps only the inputs of the segments, and pulls
//! the parameters once for all micro-batches.

use zeroshard_worker::parallel::{
    Level,
    remote::{ParameterServer, PullBy},
};

use super::batches::Batch;
use super::error::Result;
use super::model::Segment;
use super::network::Network;
use super::segments::{Hidden, Leaf, Pass, Tracking, scalar, seed};
use super::transfers::{Link, Outbox, Parameters, PushSchedule};

/// The computation of one step.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// The number of the step, which is also the version of its parameters.
    pub step: u64,
    /// The micro-batches of this worker, all of the same size.
    pub micro_batches: &'a [Batch],
    /// The factor by which the loss is multiplied before the backward pass.
    pub loss_scale: f32,
}

/// Runs a step: pulls the parameters, computes the mean loss over all micro-batches, and pushes its
/// gradient times the loss scale. Returns the mean loss in nats per character after everything has
/// been pushed.
///
/// # Errors
/// Those of the server and of the network's group. After `StepAborted` the call can be repeated.
pub fn run<S: ParameterServer>(
    level: Level,
    link: &Link<S>,
    network: &Network,
    work: Work<'_>,
) -> Result<f64> {
    let schedule = match level {
        Level::Os => PushSchedule::AtTheEnd,
        Level::OsG | Level::PGOs => PushSchedule::WhenReady,
    };
    let mut step = Step {
        network,
        work,
        parameters: Parameters::new(link, network, work.step, PullBy::Group),
        outbox: Outbox::new(link, network, work.step, schedule),
    };
    let loss = match level {
        Level::Os | Level::OsG => step.resident()?,
        Level::PGOs => step.streaming()?,
    };
    // Frees the parameters before waiting for the last gradients.
    drop(step.parameters);
    step.outbox.close()?;
    Ok(loss / work.micro_batches.len() as f64)
}

/// Computes the mean loss over `batches`, which must have the same size, with the parameters of
/// `version`, in nats per character. Holds the parameters of one segment at a time at every level.
pub fn evaluate<S: ParameterServer>(
    link: &Link<S>,
    network: &Network,
    version: u64,
    batches: &[Batch],
) -> Result<f64> {
    let mut parameters = Parameters::new(link, network, version, PullBy::Rank);
    let mut hidden: Vec<Option<Hidden>> = vec![None; batches.len()];
    let segments = network.model().segments();
    for (index, &segment) in segments.iter().enumerate() {
        let next = segments.get(index + 1).copied();
        let leaves = parameters.take(segment)?;
        if let Some(next) = next {
            parameters.prefetch(next);
        }
        for (hidden, batch) in hidden.iter_mut().zip(batches) {
            let input = hidden.take();
            let pass = Pass::forward(network, segment, &leaves, input, batch, Tracking::None)?;
            *hidden = Some(pass.output());
        }
        drop(leaves);
        parameters.release(segment, next);
    }
    let total: f64 = hidden.into_iter().flatten().map(|loss| f64::from(scalar(loss))).sum();
    Ok(total / batches.len() as f64)
}

struct Step<'a, S> {
    network: &'a Network,
    work: Work<'a>,
    parameters: Parameters<'a, S>,
    outbox: Outbox<'a, S>,
}

impl<'a, S: ParameterServer> Step<'a, S> {
    /// The gradient of each micro-batch's loss: the loss scale divided by the number of
    /// micro-batches, since the loss of the step is the mean.
    fn seed(&self) -> Hidden {
        seed(self.work.loss_scale / self.work.micro_batches.len() as f32, self.network.device())
    }

    /// Runs a step at level `os` or `os_g`. Returns the sum of the micro-batches' losses.
    fn resident(&mut self) -> Result<f64> {
        let segments = self.network.model().segments();
        for &segment in &segments {
            self.parameters.prefetch(segment);
        }
        let mut total = 0.0;
        let count = self.work.micro_batches.len();
        for (index, batch) in self.work.micro_batches.iter().enumerate() {
            let mut passes = Vec::with_capacity(segments.len());
            let mut hidden = None;
            for &segment in &segments {
                let leaves = self.parameters.take(segment)?;
                let pass = self.forward(segment, &leaves, hidden.take(), batch, Tracking::Graph)?;
                hidden = Some(pass.output());
                passes.push((segment, pass));
            }
            total += hidden.map_or(0.0, |loss| f64::from(scalar(loss)));
            let mut upstream = Some(self.seed());
            while let (Some((segment, pass)), Some(gradient)) = (passes.pop(), upstream.take()) {
                let gradients = pass.backward(gradient)?;
                self.outbox.add(segment, gradients.parameters);
                upstream = gradients.input;
                if index + 1 == count {
                    self.outbox.finish(segment)?;
                }
            }
        }
        Ok(total)
    }

    /// Runs a step at level `p_g_os`. Returns the sum of the micro-batches' losses.
    fn streaming(&mut self) -> Result<f64> {
        let segments = self.network.model().segments();
        let (&head, body) = segments.split_last().expect("a model ends with its head");
        // Only the inputs of the segments are kept for the backward pass.
        let mut inputs: Vec<Vec<Option<Hidden>>> = Vec::with_capacity(body.len());
        let mut hidden: Vec<Option<Hidden>> = vec![None; self.work.micro_batches.len()];
        for (index, &segment) in body.iter().enumerate() {
            let next = segments.get(index + 1).copied();
            let outputs = self.with_parameters(segment, next, |step, leaves| {
                let batches = hidden.iter().zip(step.work.micro_batches);
                batches
                    .map(|(hidden, batch)| {
                        let pass =
                            step.forward(segment, leaves, hidden.clone(), batch, Tracking::None)?;
                        Ok(Some(pass.output()))
                    })
                    .collect()
            })?;
            inputs.push(std::mem::replace(&mut hidden, outputs));
        }
        let mut total = 0.0;
        let seeds = vec![Some(self.seed()); hidden.len()];
        let mut upstream = self.backward(head, body.last().copied(), hidden, seeds, |loss| {
            total += f64::from(scalar(loss));
        })?;
        for (index, &segment) in body.iter().enumerate().rev() {
            let next = index.checked_sub(1).map(|index| body[index]);
            let inputs = inputs.pop().unwrap_or_default();
            upstream = self.backward(segment, next, inputs, upstream, drop)?;
        }
        Ok(total)
    }

    /// Runs the forward pass (for the second time, except for the head) and the backward pass of
    /// one segment for all micro-batches. `upstream` has the gradients of the outputs. Returns the
    /// gradients of the inputs.
    fn backward(
        &mut self,
        segment: Segment,
        next: Option<Segment>,
        inputs: Vec<Option<Hidden>>,
        upstream: Vec<Option<Hidden>>,
        mut output: impl FnMut(Hidden),
    ) -> Result<Vec<Option<Hidden>>> {
        let gradients = self.with_parameters(segment, next, |step, leaves| {
            let mut results = Vec::with_capacity(inputs.len());
            let work = inputs.into_iter().zip(upstream).zip(step.work.micro_batches);
            for ((input, upstream), batch) in work {
                let pass = step.forward(segment, leaves, input, batch, Tracking::Graph)?;
                output(pass.output());
                let gradients = pass.backward(
                    upstream.expect("the next segment has returned the gradient of its input"),
                )?;
                step.outbox.add(segment, gradients.parameters);
                results.push(gradients.input);
            }
            Ok(results)
        })?;
        self.outbox.finish(segment)?;
        Ok(gradients)
    }

    /// Runs `compute` with the parameters of a segment while those of `next` are being pulled.
    fn with_parameters<T>(
        &mut self,
        segment: Segment,
        next: Option<Segment>,
        compute: impl FnOnce(&mut Self, &[Leaf]) -> Result<T>,
    ) -> Result<T> {
        let leaves = self.parameters.take(segment)?;
        if let Some(next) = next {
            self.parameters.prefetch(next);
        }
        let result = compute(self, &leaves)?;
        drop(leaves);
        self.parameters.release(segment, next);
        Ok(result)
    }

    fn forward(
        &self,
        segment: Segment,
        leaves: &[Leaf],
        hidden: Option<Hidden>,
        batch: &Batch,
        tracking: Tracking,
    ) -> Result<Pass<'a>> {
        Ok(Pass::forward(self.network, segment, leaves, hidden, batch, tracking)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use tokio::runtime::Runtime;
    use zeroshard_model::Error;

    use super::*;
    use crate::device::Device;
    use crate::memory::Ledger;
    use crate::model::{Architecture, EMBEDDING, Model};
    use crate::segments::leaf;
    use zeroshard_worker::parallel::remote::{Buffer, Gradient};

    /// A parameter server in memory.
    #[derive(Default)]
    struct Table {
        parameters: BTreeMap<usize, Vec<f32>>,
        pushed: Mutex<BTreeMap<usize, Vec<f32>>>,
        pulls: Mutex<Vec<usize>>,
        abort: bool,
    }

    impl ParameterServer for Table {
        async fn pull(
            self: Arc<Self>,
            _: u64,
            mut buffers: Vec<Buffer>,
            _: PullBy,
        ) -> zeroshard_worker::parallel::Result<Vec<Buffer>> {
            for buffer in &mut buffers {
                buffer.values.copy_from_slice(&self.parameters[&buffer.tensor]);
                self.pulls.lock().unwrap().push(buffer.tensor);
            }
            Ok(buffers)
        }

        async fn push(
            self: Arc<Self>,
            step: u64,
            gradients: Vec<Gradient>,
        ) -> zeroshard_worker::parallel::Result<()> {
            if self.abort {
                let cause = "rank 1 left".to_owned();
                return Err(
                    Error::StepAborted { job: "job".to_owned(), step, epoch: 2, cause }.into()
                );
            }
            let mut pushed = self.pushed.lock().unwrap();
            for (tensor, values) in gradients {
                let before = pushed.insert(tensor, values.to_vec());
                assert_eq!(before, None, "tensor {tensor} was pushed twice");
            }
            Ok(())
        }
    }

    fn network() -> Network {
        let sizes =
            Architecture { vocabulary: 23, context: 8, width: 16, blocks: 3, heads: 2, hidden: 64 };
        Network::whole(Model::new(sizes), Device::default())
    }

    fn batches(micro_batches: usize) -> Vec<Batch> {
        let text: Vec<u8> = (0..400u32).map(|i| ((i * i + i / 7) % 23) as u8).collect();
        let starts: Vec<usize> = (0..12).map(|i| i * 31).collect();
        starts.chunks(12 / micro_batches).map(|starts| Batch::cut(&text, starts, 8)).collect()
    }

    fn initial(model: &Model) -> BTreeMap<usize, Vec<f32>> {
        let owners = model.parameters().iter().enumerate().filter(|(_, p)| p.alias_of.is_none());
        owners.map(|(tensor, _)| (tensor, model.initial_values(5, tensor))).collect()
    }

    fn link(model: &Model, runtime: &Runtime) -> Link<Table> {
        let parameters = initial(model);
        let table = Table { parameters, ..Table::default() };
        Link {
            server: Arc::new(table),
            runtime: runtime.handle().clone(),
            ledger: Ledger::default(),
        }
    }

    struct Outcome {
        loss: f64,
        gradients: BTreeMap<usize, Vec<f32>>,
        peak: usize,
        pulls: usize,
    }

    fn outcome(level: Level, micro_batches: usize) -> Outcome {
        let (network, runtime) = (network(), Runtime::new().unwrap());
        let link = link(network.model(), &runtime);
        let work = Work { step: 0, micro_batches: &batches(micro_batches), loss_scale: 1.0 };
        let loss = run(level, &link, &network, work).unwrap();
        assert_eq!(link.ledger.held(), 0, "{level} holds nothing after the step");
        let gradients = std::mem::take(&mut *link.server.pushed.lock().unwrap());
        let pulls = link.server.pulls.lock().unwrap().len();
        Outcome { loss, gradients, peak: link.ledger.peak(), pulls }
    }

    /// The loss and the gradients from one graph over the whole model.
    fn whole_graph() -> (f64, BTreeMap<usize, Vec<f32>>) {
        let network = network();
        let values = initial(network.model());
        let leaves: BTreeMap<_, _> = values
            .iter()
            .map(|(&tensor, v)| (tensor, leaf(v.clone(), network.device()).require_grad()))
            .collect();
        let loss = crate::segments::whole(&network, &leaves, &batches(1)[0]);
        let gradients = loss.backward();
        let of = |leaf: &Leaf| leaf.grad(&gradients).unwrap().into_data().into_vec().unwrap();
        let table = leaves.iter().map(|(&tensor, leaf)| (tensor, of(leaf))).collect();
        (f64::from(loss.into_scalar()), table)
    }

    fn bits(gradients: &BTreeMap<usize, Vec<f32>>) -> Vec<(usize, Vec<u32>)> {
        gradients.iter().map(|(&t, v)| (t, v.iter().map(|x| x.to_bits()).collect())).collect()
    }

    #[test]
    fn gradients_by_segment_equal_those_of_one_graph() {
        let (loss, expected) = whole_graph();
        let found = outcome(Level::Os, 1);
        assert_eq!(found.loss, loss);
        assert_eq!(found.gradients.len(), expected.len());
        for (tensor, expected) in &expected {
            let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let difference: Vec<f32> =
                expected.iter().zip(&found.gradients[tensor]).map(|(a, b)| a - b).collect();
            assert!(norm(expected) > 0.0, "tensor {tensor} has a gradient");
            assert!(norm(&difference) <= 1e-6 * norm(expected), "tensor {tensor}");
        }
    }

    #[test]
    fn levels_give_the_same_bits() {
        for micro_batches in [1, 3] {
            let os = outcome(Level::Os, micro_batches);
            for level in [Level::OsG, Level::PGOs] {
                let other = outcome(level, micro_batches);
                assert_eq!(
                    other.loss.to_bits(),
                    os.loss.to_bits(),
                    "{level}, {micro_batches} micro-batches"
                );
                assert_eq!(
                    bits(&other.gradients),
                    bits(&os.gradients),
                    "{level}, {micro_batches} micro-batches"
                );
            }
        }
    }

    #[test]
    fn micro_batches_sum_to_the_whole_batch() {
        let (whole, parts) = (outcome(Level::PGOs, 1), outcome(Level::PGOs, 4));
        assert!((whole.loss - parts.loss).abs() < 1e-6 * whole.loss);
        for (tensor, whole) in &whole.gradients {
            let scale = whole.iter().fold(0f32, |max, x| max.max(x.abs()));
            for (a, b) in whole.iter().zip(&parts.gradients[tensor]) {
                assert!((a - b).abs() <= 1e-5 * scale, "tensor {tensor}: {a} and {b}");
            }
        }
    }

    #[test]
    fn every_trained_tensor_is_pushed_once_and_no_alias() {
        let expected: Vec<usize> = (0..network().model().parameters().len() - 1).collect();
        for level in Level::ALL {
            let pushed: Vec<usize> = outcome(level, 1).gradients.into_keys().collect();
            assert_eq!(pushed, expected, "{level}");
        }
    }

    #[test]
    fn each_level_holds_less_than_the_previous_one() {
        let all = network().model().elements() * size_of::<f32>();
        let [os, os_g, p_g_os] = Level::ALL.map(|level| outcome(level, 2).peak);
        assert!(os >= 2 * all, "{os} of {all}");
        assert!(os_g <= os, "{os_g} and {os}");
        assert!(p_g_os < os_g, "{p_g_os} and {os_g}");
    }

    #[test]
    fn p_g_os_pulls_parameters_once_for_all_micro_batches() {
        assert_eq!(outcome(Level::PGOs, 1).pulls, outcome(Level::PGOs, 4).pulls);
    }

    #[test]
    fn loss_scale_multiplies_the_gradient_and_not_the_loss() {
        let (network, runtime) = (network(), Runtime::new().unwrap());
        let link = link(network.model(), &runtime);
        let work = Work { step: 0, micro_batches: &batches(1), loss_scale: 1024.0 };
        let loss = run(Level::OsG, &link, &network, work).unwrap();
        let plain = outcome(Level::OsG, 1);
        assert_eq!(loss, plain.loss);
        let scaled = &link.server.pushed.lock().unwrap()[&EMBEDDING];
        let pairs = scaled.iter().zip(&plain.gradients[&EMBEDDING]);
        assert!(pairs.into_iter().all(|(a, b)| (a - 1024.0 * b).abs() <= 1e-5 * a.abs()));
    }

    #[test]
    fn an_aborted_step_can_be_run_again() {
        let (network, runtime) = (network(), Runtime::new().unwrap());
        let mut link = link(network.model(), &runtime);
        Arc::get_mut(&mut link.server).unwrap().abort = true;
        for level in Level::ALL {
            let work = Work { step: 0, micro_batches: &batches(1), loss_scale: 1.0 };
            let error = run(level, &link, &network, work).unwrap_err();
            assert!(
                matches!(error, crate::error::Error::Cluster(Error::StepAborted { .. })),
                "{error}"
            );
        }
        link.server =
            Arc::new(Table { parameters: link.server.parameters.clone(), ..Table::default() });
        let work = Work { step: 0, micro_batches: &batches(1), loss_scale: 1.0 };
        assert_eq!(run(Level::PGOs, &link, &network, work).unwrap(), outcome(Level::PGOs, 1).loss);
    }

    #[test]
    fn evaluation_is_the_loss_of_a_step() {
        let (network, runtime) = (network(), Runtime::new().unwrap());
        let link = link(network.model(), &runtime);
        assert_eq!(evaluate(&link, &network, 0, &batches(2)).unwrap(), outcome(Level::Os, 2).loss);
        assert_eq!(link.ledger.held(), 0);
    }
}
