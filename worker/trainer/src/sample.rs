//! Generates text with the model, character by character.

use zeroshard_worker::parallel::remote::{ParameterServer, PullBy};

use super::batches::Batch;
use super::error::Result;
use super::model::Segment;
use super::network::Network;
use super::random::Stream;
use super::segments::{Leaf, Pass, Tracking, last_logits};
use super::transfers::{Link, Parameters};

/// The sampling temperature.
const TEMPERATURE: f64 = 0.7;
/// The part of the key that distinguishes samples from other uses of the seed.
const SAMPLE_STREAM: u64 = 3;

/// A request for a sample.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The version of the parameters.
    pub version: u64,
    /// The text to continue; at least one character.
    pub prompt: &'a [u8],
    /// The number of characters to add.
    pub count: usize,
    /// The run's seed.
    pub seed: u64,
}

/// Continues the prompt. Pulls and holds all parameters, unless `count` is 0. `network` must have
/// the whole model.
///
/// # Errors
/// Those of the pull.
pub fn generate<S: ParameterServer>(
    link: &Link<S>,
    network: &Network,
    request: Request<'_>,
) -> Result<Vec<u8>> {
    if request.count == 0 {
        return Ok(Vec::new());
    }
    let mut parameters = Parameters::new(link, network, request.version, PullBy::Rank);
    let segments = network.model().segments();
    segments.iter().for_each(|&segment| parameters.prefetch(segment));
    let leaves: Vec<(Segment, Vec<Leaf>)> = segments
        .into_iter()
        .map(|segment| Ok((segment, parameters.take(segment)?)))
        .collect::<Result<_>>()?;
    let mut text = request.prompt.to_vec();
    for index in 0..request.count {
        let visible = &text[text.len().saturating_sub(network.model().architecture().context)..];
        let logits = next_logits(network, &leaves, &Batch::prompt(visible))?;
        let point = Stream::new(&[request.seed, SAMPLE_STREAM, index as u64]).unit();
        text.push(choose(&logits, f64::from(point)));
    }
    Ok(text.split_off(request.prompt.len()))
}

fn next_logits(
    network: &Network,
    leaves: &[(Segment, Vec<Leaf>)],
    visible: &Batch,
) -> Result<Vec<f32>> {
    let mut hidden = None;
    for (segment, leaves) in leaves {
        if let (Segment::Head, Some(hidden)) = (segment, &hidden) {
            return Ok(last_logits(network, leaves, Clone::clone(hidden), visible)?);
        }
        let pass =
            Pass::forward(network, *segment, leaves, hidden.take(), visible, Tracking::None)?;
        hidden = Some(pass.output());
    }
    unreachable!("a model ends with its head");
}

/// The character at quantile `point` (in `[0, 1)`) of the distribution of the logits.
fn choose(logits: &[f32], point: f64) -> u8 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits.iter().map(|&logit| (f64::from(logit - highest) / TEMPERATURE).exp());
    let mut left = point * weights.clone().sum::<f64>();
    let last = logits.len() - 1;
    let chosen = weights.into_iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    u8::try_from(chosen.unwrap_or(last)).expect("a vocabulary has at most 256 characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_chosen_by_their_probability() {
        let logits = [0.0, f32::NEG_INFINITY, 0.0, 100.0 * f32::MIN_POSITIVE];
        let chosen: Vec<u8> = (0..6).map(|i| choose(&logits, f64::from(i) / 6.0)).collect();
        assert_eq!(chosen, [0, 0, 2, 2, 3, 3]);
    }

    #[test]
    fn nan_logits_give_a_valid_character() {
        assert_eq!(choose(&[f32::NAN, f32::NAN], 0.5), 1);
    }
}
