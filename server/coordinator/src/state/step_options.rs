//! The options of a step, which must be equal on all ranks.

use zeroshard_model::{Error, JobSpec, Optimizer, Result};

use crate::vocabulary::calls::Commit;

/// The arguments of a commit that must be equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepOptions {
    pub(crate) groups: Vec<Optimizer>,
    pub(crate) loss_scale: f64,
    pub(crate) max_norm: Option<f64>,
    /// Empty, or one for each tensor.
    pub(crate) gradient_factors: Vec<f64>,
    /// Hashes of the values that the program has written. Empty, or one for each tensor; 0
    /// for a tensor without such values.
    pub(crate) written: Vec<u64>,
}

/// The first field in which two options differ.
#[derive(Debug, PartialEq)]
pub(crate) struct Difference {
    pub(crate) what: String,
    /// The value of both.
    pub(crate) values: [String; 2],
}

impl StepOptions {
    /// The options of a rank's commit.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not fit to the job.
    pub(crate) fn of(commit: &Commit, spec: &JobSpec) -> Result<Self> {
        let options = Self {
            groups: commit.groups.clone().unwrap_or_else(|| spec.groups.clone()),
            loss_scale: commit.loss_scale,
            max_norm: commit.max_norm,
            gradient_factors: commit.gradient_factors.clone(),
            written: commit.written.clone(),
        };
        spec.validate_step(&options.groups)?;
        check_number("gradient factors", options.gradient_factors.len(), spec)?;
        check_number("hashes of written values", options.written.len(), spec)?;
        Ok(options)
    }

    pub(crate) fn difference(&self, other: &Self, spec: &JobSpec) -> Option<Difference> {
        if self == other {
            return None;
        }
        let difference = |what: String, values: [String; 2]| Some(Difference { what, values });
        let both = [self, other];
        if self.loss_scale != other.loss_scale {
            return difference(
                "loss_scale".into(),
                both.map(|options| options.loss_scale.to_string()),
            );
        }
        if self.max_norm != other.max_norm {
            let text = |norm: Option<f64>| norm.map_or("none".into(), |norm| norm.to_string());
            return difference("max_norm".into(), both.map(|options| text(options.max_norm)));
        }
        let groups = self.groups.iter().zip(&other.groups).enumerate();
        for (index, (ours, theirs)) in groups {
            if let Some((name, values)) = ours.difference(theirs) {
                return difference(format!("{name} of parameter group {index}"), values);
            }
        }
        for (tensor, spec) in spec.manifest.tensors().iter().enumerate() {
            let factors = both.map(|options| options.factor(tensor));
            // A factor may be NaN, which is not equal to itself.
            if factors[0].to_bits() != factors[1].to_bits() {
                let what = format!("factor of the gradient of tensor {:?}", spec.name);
                return difference(what, factors.map(|factor| factor.to_string()));
            }
            let written = both.map(|options| options.written.get(tensor).map_or(0, |&hash| hash));
            if written[0] != written[1] {
                let what = format!("values that the program has written to tensor {:?}", spec.name);
                let text = |hash| match hash {
                    0 => "none".to_owned(),
                    hash => format!("values with the hash {hash:016x}"),
                };
                return difference(what, written.map(text));
            }
        }
        None
    }

    fn factor(&self, tensor: usize) -> f64 {
        self.gradient_factors.get(tensor).map_or(1.0, |&factor| factor)
    }
}

/// Checks the length of a list with a value for each tensor, which may be empty.
fn check_number(what: &str, found: usize, spec: &JobSpec) -> Result<()> {
    let tensors = spec.manifest.tensors().len();
    if found == 0 || found == tensors {
        return Ok(());
    }
    let expected = format!("0, or the job's number of tensors, {tensors}");
    Err(Error::invalid(format!("number of {what}"), found, expected))
}
