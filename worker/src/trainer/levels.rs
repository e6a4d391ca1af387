//! One step of a worker at each level. The arithmetic is the same; the lifetimes of parameters and
//! gradients differ.
//!
//! | level | parameters | gradients |
//! |---|---|---|
//! | `os` | all, for the whole step | all kept, pushed at the end |
//! | `os_g` | all, for the whole step | pushed and freed by segment, while backward goes on |
//! | `p_g_os` | one segment's at a time, the next one's on its way | as `os_g` |
//!
//! Micro-batches are summed here, in f32 and in order, and pushed once: the same bits at every
//! level and `1/m` of the traffic of pushing each. `os` and `os_g` run them one after the other,
//! since they keep the graphs of one micro-batch. `p_g_os` runs all of them through a segment
//! before it goes on to the next: it keeps only the segments' inputs, and its parameters are pulled
//! once for all micro-batches.

use super::batches::Batch;
use super::error::Result;
use super::model::Segment;
use super::network::Network;
use super::segments::{Hidden, Leaf, Pass, Tracking, scalar, seed};
use super::travel::{Departure, Link, Outbox, Parameters};
use crate::parallel::Level;
use crate::parallel::remote::ParameterServer;

/// The computation of one step.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// The step; its parameters have the version of the same number.
    pub step: u64,
    /// This worker's micro-batches, all of one size.
    pub micro_batches: &'a [Batch],
    /// The gradients are those of the mean loss times this.
    pub loss_scale: f32,
}

/// Pulls parameters, computes, and pushes the gradient of the mean loss over all micro-batches
/// times the loss scale. Returns the mean loss, nats per character, after everything has been
/// pushed.
///
/// # Errors
/// Those of the server, and of the network's group. After `StepAborted` the same call may be made
/// again.
pub fn run<S: ParameterServer>(
    level: Level,
    link: &Link<S>,
    network: &Network,
    work: Work<'_>,
) -> Result<f64> {
    let departure = match level {
        Level::Os => Departure::AtTheEnd,
        Level::OsG | Level::PGOs => Departure::WhenReady,
    };
    let mut step = Step {
        network,
        work,
        parameters: Parameters::new(link, network, work.step),
        outbox: Outbox::new(link, network, work.step, departure),
    };
    let loss = match level {
        Level::Os | Level::OsG => step.resident()?,
        Level::PGOs => step.streaming()?,
    };
    // Frees the parameters before the last gradients leave.
    drop(step.parameters);
    step.outbox.close()?;
    Ok(loss / work.micro_batches.len() as f64)
}

/// The mean loss over `batches` (of one size) at `version`, nats per character. Holds one segment's
/// parameters at a time, whatever the level.
pub fn evaluate<S: ParameterServer>(
    link: &Link<S>,
    network: &Network,
    version: u64,
    batches: &[Batch],
) -> Result<f64> {
    let mut parameters = Parameters::new(link, network, version);
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
    /// The gradient that starts every micro-batch's backward pass: the result is the gradient of
    /// the mean.
    fn seed(&self) -> Hidden {
        seed(self.work.loss_scale / self.work.micro_batches.len() as f32)
    }

    /// The levels `os` and `os_g`. Returns the sum of the micro-batches' losses.
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

    /// The level `p_g_os`. Returns the sum of the micro-batches' losses.
    fn streaming(&mut self) -> Result<f64> {
        let segments = self.network.model().segments();
        let (&head, body) = segments.split_last().expect("a model ends with its head");
        // The inputs of the segments: all that is kept for the backward pass.
        let mut inputs: Vec<Vec<Option<Hidden>>> = Vec::with_capacity(body.len());
        let mut hidden: Vec<Option<Hidden>> = vec![None; self.work.micro_batches.len()];
        for (index, &segment) in body.iter().enumerate() {
            let next = segments.get(index + 1).copied();
            let outputs = self.visit(segment, next, |step, leaves| {
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
        let mut upstream = self.turn(head, body.last().copied(), hidden, seeds, |loss| {
            total += f64::from(scalar(loss));
        })?;
        for (index, &segment) in body.iter().enumerate().rev() {
            let next = index.checked_sub(1).map(|index| body[index]);
            let inputs = inputs.pop().unwrap_or_default();
            upstream = self.turn(segment, next, inputs, upstream, drop)?;
        }
        Ok(total)
    }

    /// Forward (a second time, except for the head) and backward through one segment, for all
    /// micro-batches. Takes the gradients of its outputs and returns those of its inputs.
    fn turn(
        &mut self,
        segment: Segment,
        next: Option<Segment>,
        inputs: Vec<Option<Hidden>>,
        upstream: Vec<Option<Hidden>>,
        mut output: impl FnMut(Hidden),
    ) -> Result<Vec<Option<Hidden>>> {
        let gradients = self.visit(segment, next, |step, leaves| {
            let mut results = Vec::with_capacity(inputs.len());
            let work = inputs.into_iter().zip(upstream).zip(step.work.micro_batches);
            for ((input, upstream), batch) in work {
                let pass = step.forward(segment, leaves, input, batch, Tracking::Graph)?;
                output(pass.output());
                let gradients = pass.backward(
                    upstream.expect("the segment after this one has a gradient of its input"),
                )?;
                step.outbox.add(segment, gradients.parameters);
                results.push(gradients.input);
            }
            Ok(results)
        })?;
        self.outbox.finish(segment)?;
        Ok(gradients)
    }

    /// Runs `compute` with a segment's parameters, while those of `next` are being pulled.
    fn visit<T>(
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
    use zeroshard_proto::Error;

    use super::*;
    use crate::parallel::remote::{Buffer, Gradient};
    use crate::trainer::memory::Ledger;
    use crate::trainer::model::{Architecture, EMBEDDING, Model};
    use crate::trainer::segments::leaf;

    /// A cluster that is a table.
    #[derive(Default)]
    struct Table {
        parameters: BTreeMap<usize, Vec<f32>>,
        pushed: Mutex<BTreeMap<usize, Vec<f32>>>,
        pulls: Mutex<Vec<usize>>,
        abort: bool,
    }

    impl ParameterServer for Table {
        async fn pull(
            &self,
            _: u64,
            mut buffers: Vec<Buffer>,
        ) -> zeroshard_proto::Result<Vec<Buffer>> {
            for buffer in &mut buffers {
                buffer.values.copy_from_slice(&self.parameters[&buffer.tensor]);
                self.pulls.lock().unwrap().push(buffer.tensor);
            }
            Ok(buffers)
        }

        async fn push(&self, step: u64, gradients: Vec<Gradient>) -> zeroshard_proto::Result<()> {
            if self.abort {
                let cause = "rank 1 left".to_owned();
                return Err(Error::StepAborted { job: "job".to_owned(), step, epoch: 2, cause });
            }
            let mut pushed = self.pushed.lock().unwrap();
            for (tensor, values) in gradients {
                assert_eq!(pushed.insert(tensor, values), None, "tensor {tensor} was pushed twice");
            }
            Ok(())
        }
    }

    fn network() -> Network {
        let sizes =
            Architecture { vocabulary: 23, context: 8, width: 16, blocks: 3, heads: 2, hidden: 64 };
        Network::whole(Model::new(sizes))
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

    /// The same gradients from one graph over the whole model.
    fn whole_graph() -> (f64, BTreeMap<usize, Vec<f32>>) {
        let network = network();
        let values = initial(network.model());
        let leaves: BTreeMap<_, _> =
            values.iter().map(|(&tensor, v)| (tensor, leaf(v.clone()).require_grad())).collect();
        let loss = crate::trainer::segments::whole(&network, &leaves, &batches(1)[0]);
        let gradients = loss.backward();
        let of = |leaf: &Leaf| leaf.grad(&gradients).unwrap().into_data().into_vec().unwrap();
        let table = leaves.iter().map(|(&tensor, leaf)| (tensor, of(leaf))).collect();
        (f64::from(loss.into_scalar()), table)
    }

    fn bits(gradients: &BTreeMap<usize, Vec<f32>>) -> Vec<(usize, Vec<u32>)> {
        gradients.iter().map(|(&t, v)| (t, v.iter().map(|x| x.to_bits()).collect())).collect()
    }

    #[test]
    fn gradients_by_segment_are_those_of_the_whole_graph() {
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
    fn each_level_holds_less_than_the_one_before() {
        let all = network().model().elements() * size_of::<f32>();
        let [os, os_g, p_g_os] = Level::ALL.map(|level| outcome(level, 2).peak);
        assert!(os >= 2 * all, "{os} of {all}");
        assert!(os_g <= os, "{os_g} and {os}");
        assert!(p_g_os < os_g, "{p_g_os} and {os_g}");
    }

    #[test]
    fn micro_batches_cost_p_g_os_no_more_pulls() {
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
    fn an_aborted_step_leaves_nothing_and_can_run_again() {
        let (network, runtime) = (network(), Runtime::new().unwrap());
        let mut link = link(network.model(), &runtime);
        Arc::get_mut(&mut link.server).unwrap().abort = true;
        for level in Level::ALL {
            let work = Work { step: 0, micro_batches: &batches(1), loss_scale: 1.0 };
            let error = run(level, &link, &network, work).unwrap_err();
            assert!(
                matches!(error, crate::trainer::error::Error::Cluster(Error::StepAborted { .. })),
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
