//! Buckets of gradients, and the order in which they are sent.

use zeroshard_model::{DType, Error, Result};

/// Gradients in buckets. The gradients of a bucket have one dtype and are in forward order, and a
/// bucket closes when it reaches a number of bytes. A bucket is sent when it is complete and all
/// buckets behind it have been sent, because backward computes gradients in approximately the
/// reverse order.
#[derive(Debug, Clone)]
pub struct Buckets {
    /// The tensors of each bucket, ascending; the buckets are ordered by their first tensor.
    buckets: Vec<Vec<usize>>,
    /// The bucket of each tensor.
    bucket_of: Vec<usize>,
    ready: Vec<bool>,
    /// The number of buckets that have not been sent. They are the first ones of the list; the last
    /// of them is sent next.
    unsent: usize,
}

impl Buckets {
    /// Creates buckets for tensors of the given sizes in bytes and dtypes. A bucket closes when it
    /// has `limit` bytes or more. The first bucket of each dtype, which is sent last, closes at
    /// `first_limit`, so that little remains to be sent when backward ends.
    pub fn new(tensors: &[(usize, DType)], limit: usize, first_limit: usize) -> Self {
        let mut buckets = Vec::new();
        for dtype in DType::ALL {
            let (mut open, mut bytes, mut closes_at) = (Vec::new(), 0, first_limit);
            let of_dtype = tensors.iter().enumerate().filter(|(_, (_, other))| *other == dtype);
            for (tensor, &(size, _)) in of_dtype {
                open.push(tensor);
                bytes += size;
                if bytes >= closes_at {
                    buckets.push(std::mem::take(&mut open));
                    (bytes, closes_at) = (0, limit);
                }
            }
            buckets.extend(Some(open).filter(|open| !open.is_empty()));
        }
        buckets.sort_by_key(|bucket| bucket.first().copied());
        let mut bucket_of = vec![0; tensors.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.iter().for_each(|&tensor| bucket_of[tensor] = index);
        }
        Self { unsent: buckets.len(), ready: vec![false; tensors.len()], bucket_of, buckets }
    }

    /// The tensors of each bucket.
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.buckets
    }

    /// Marks a gradient as complete, and returns the tensors that can be sent now.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown tensor, or one that was already marked in this round.
    pub fn ready(&mut self, tensor: usize) -> Result<Vec<usize>> {
        match self.ready.get_mut(tensor) {
            None => {
                let expected = format!("less than the number of tensors, {}", self.ready.len());
                return Err(Error::invalid("tensor of a bucket", tensor, expected));
            }
            Some(true) => {
                return Err(Error::refused(format!(
                    "the gradient of tensor {tensor} is ready for the second time in one backward \
                     pass; run every backward pass except the last under `no_sync()`"
                )));
            }
            Some(ready) => *ready = true,
        }
        let mut sent = Vec::new();
        if self.bucket_of[tensor] + 1 == self.unsent {
            while let Some(last) = self.unsent.checked_sub(1)
                && self.buckets[last].iter().all(|&tensor| self.ready[tensor])
            {
                sent.extend_from_slice(&self.buckets[last]);
                self.unsent = last;
            }
        }
        Ok(sent)
    }

    /// The tensors that are not complete, ascending.
    pub fn rest(&self) -> Vec<usize> {
        (0..self.ready.len()).filter(|&tensor| !self.ready[tensor]).collect()
    }

    /// Begins the next round.
    pub fn reset(&mut self) {
        self.ready.fill(false);
        self.unsent = self.buckets.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    fn f32s(numels: &[usize]) -> Vec<(usize, DType)> {
        numels.iter().map(|numel| (4 * numel, DType::F32)).collect()
    }

    #[test]
    fn a_bucket_closes_once_it_has_its_limit_and_the_first_one_early() {
        let tensors = f32s(&[100_000, 100_000, 200_000, 1_000_000, 7_000_000, 10]);
        let buckets = Buckets::new(&tensors, 25 * MB, MB);
        assert_eq!(buckets.buckets(), [vec![0, 1, 2], vec![3, 4], vec![5]]);
    }

    #[test]
    fn a_bucket_has_one_dtype() {
        let tensors = [(4, DType::F32), (2, DType::Bf16), (4, DType::F32), (2, DType::Bf16)];
        assert_eq!(Buckets::new(&tensors, MB, MB).buckets(), [vec![0, 2], vec![1, 3]]);
    }

    #[test]
    fn complete_buckets_are_sent_last_first() {
        let mut buckets = Buckets::new(&f32s(&[1, 1, 1, 1]), 8, 4);
        assert_eq!(buckets.buckets(), [vec![0], vec![1, 2], vec![3]]);
        assert_eq!(buckets.ready(2), Ok(vec![]));
        assert_eq!(buckets.ready(1), Ok(vec![]));
        assert_eq!(buckets.rest(), [0, 3]);
        assert_eq!(buckets.ready(3), Ok(vec![3, 1, 2]));
        assert!(buckets.ready(3).is_err());
        assert_eq!(buckets.ready(0), Ok(vec![0]));
        buckets.reset();
        assert_eq!(buckets.rest(), [0, 1, 2, 3]);
        assert_eq!(buckets.ready(3), Ok(vec![3]));
        assert!(buckets.ready(4).is_err());
    }
}
