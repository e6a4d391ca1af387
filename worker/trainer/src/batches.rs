//! The windows of text on which a replica of the model is trained in a step.
//!
//! The windows of a step are drawn for the whole global batch, each from a key (seed, step,
//! window), and a replica takes a contiguous part. Therefore the data of a step do not depend on
//! the number of workers, and are the same if the step is run again.

use thiserror::Error;

use super::random::Stream;

/// Windows of text: rows of `length` characters, and for each character the one that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    length: usize,
    inputs: Vec<u8>,
    targets: Vec<u8>,
}

impl Batch {
    /// Creates a batch of the windows of `text` that begin at `starts`. From each start, `text`
    /// must have at least `length + 1` characters.
    pub fn cut(text: &[u8], starts: &[usize], length: usize) -> Self {
        let gather = |offset: usize| {
            starts
                .iter()
                .flat_map(|&start| &text[start + offset..start + offset + length])
                .copied()
                .collect()
        };
        Self { length, inputs: gather(0), targets: gather(1) }
    }

    /// Creates a batch of one window without targets, for sampling.
    pub fn prompt(characters: &[u8]) -> Self {
        Self { length: characters.len(), inputs: characters.to_vec(), targets: Vec::new() }
    }

    /// The number of characters in a window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The number of windows.
    pub fn windows(&self) -> usize {
        self.inputs.len() / self.length
    }

    /// The `windows * length` characters, row by row.
    pub fn inputs(&self) -> &[u8] {
        &self.inputs
    }

    /// The character after each input.
    pub fn targets(&self) -> &[u8] {
        &self.targets
    }
}

/// The error for a batch that cannot be divided.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// The batch is not divisible. With parts of different sizes, the mean of their means would not
    /// be the mean of the batch.
    #[error(
        "--batch {batch} cannot be divided into {replicas} replica(s) x {micro_batches} \
         micro-batch(es) of equal size; use a multiple of {}, such as {}",
        replicas * micro_batches,
        batch.div_ceil(replicas * micro_batches).max(1) * replicas * micro_batches
    )]
    Uneven {
        /// The number of windows in the global batch.
        batch: usize,
        /// The number of replicas of the model.
        replicas: usize,
        /// The number of micro-batches of a replica.
        micro_batches: usize,
    },
}

/// The division of a global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharding {
    batch: usize,
    replicas: usize,
    micro_batches: usize,
}

impl Sharding {
    /// Divides `batch` windows among `replicas` replicas with `micro_batches` micro-batches each.
    /// Both numbers must be at least 1.
    ///
    /// # Errors
    /// [`Error::Uneven`] unless every micro-batch has the same number of windows, at least one.
    pub fn new(batch: usize, replicas: usize, micro_batches: usize) -> Result<Self, Error> {
        if batch == 0 || !batch.is_multiple_of(replicas * micro_batches) {
            return Err(Error::Uneven { batch, replicas, micro_batches });
        }
        Ok(Self { batch, replicas, micro_batches })
    }

    /// The number of windows in the global batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Draws the micro-batches of a replica for a step, in order.
    pub fn draw(
        &self,
        text: &[u8],
        length: usize,
        Draw { seed, step, replica }: Draw,
    ) -> Vec<Batch> {
        let share = self.batch / self.replicas;
        let positions = text.len() - length;
        let starts: Vec<usize> = (replica * share..(replica + 1) * share)
            .map(|window| Stream::new(&[seed, WINDOW_STREAM, step, window as u64]).below(positions))
            .collect();
        starts
            .chunks(share / self.micro_batches)
            .map(|starts| Batch::cut(text, starts, length))
            .collect()
    }
}

/// The key from which the windows of a replica are drawn.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The replica.
    pub replica: usize,
}

/// The part of the key that distinguishes windows from other uses of the seed.
const WINDOW_STREAM: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> Vec<u8> {
        (0..1000u32).map(|i| (i % 97) as u8).collect()
    }

    fn inputs(sharding: Sharding, replica: usize, step: u64) -> Vec<u8> {
        sharding
            .draw(&text(), 8, Draw { seed: 3, step, replica })
            .iter()
            .flat_map(|batch| batch.inputs().to_vec())
            .collect()
    }

    #[test]
    fn windows_of_a_step_do_not_depend_on_the_number_of_replicas() {
        let whole = inputs(Sharding::new(12, 1, 1).unwrap(), 0, 5);
        for replicas in [2, 3, 4, 12] {
            let sharding = Sharding::new(12, replicas, 1).unwrap();
            let parts: Vec<u8> =
                (0..replicas).flat_map(|replica| inputs(sharding, replica, 5)).collect();
            assert_eq!(parts, whole, "{replicas} replicas");
        }
    }

    #[test]
    fn micro_batches_divide_the_windows_of_a_replica_in_order() {
        let whole = inputs(Sharding::new(12, 2, 1).unwrap(), 1, 0);
        let sharding = Sharding::new(12, 2, 3).unwrap();
        assert_eq!(sharding.draw(&text(), 8, Draw { seed: 3, step: 0, replica: 1 }).len(), 3);
        assert_eq!(inputs(sharding, 1, 0), whole);
    }

    #[test]
    fn steps_see_different_windows() {
        let sharding = Sharding::new(4, 1, 1).unwrap();
        assert_eq!(inputs(sharding, 0, 1), inputs(sharding, 0, 1));
        assert_ne!(inputs(sharding, 0, 1), inputs(sharding, 0, 2));
    }

    #[test]
    fn targets_are_the_inputs_shifted_by_one() {
        let text = text();
        let batch = Batch::cut(&text, &[3, 90], 4);
        assert_eq!(batch.windows(), 2);
        assert_eq!(batch.inputs(), [3, 4, 5, 6, 90, 91, 92, 93]);
        assert_eq!(batch.targets(), [4, 5, 6, 7, 91, 92, 93, 94]);
    }

    #[test]
    fn an_indivisible_batch_is_refused_and_the_error_suggests_a_size() {
        let error = Sharding::new(10, 2, 4).unwrap_err();
        assert!(error.to_string().contains("such as 16"), "{error}");
        assert!(Sharding::new(0, 1, 1).is_err());
    }
}
