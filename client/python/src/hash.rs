//! Hashes of tensors' values, which show whether the program has written to them.

use pyo3::prelude::*;

use crate::array::{Array, Lent};

/// Returns a hash of each array. Several threads compute them without the GIL.
#[pyfunction]
pub(crate) fn hashes(py: Python<'_>, arrays: Vec<PyRef<'_, Array>>) -> PyResult<Vec<u64>> {
    let lent = arrays.iter().map(|array| Lent::new(py, array)).collect::<PyResult<Vec<_>>>()?;
    Ok(py.detach(|| hashes_of(&lent.iter().collect::<Vec<_>>())))
}

/// Returns of each array what differs if its values do: `(True, number)` if it has exactly what
/// servers show there, or have shown before it became memory of this process, and otherwise
/// `(False, hash)`.
#[pyfunction]
pub(crate) fn looks(py: Python<'_>, arrays: Vec<PyRef<'_, Array>>) -> PyResult<Vec<(bool, u64)>> {
    let lent = arrays.iter().map(|array| Lent::new(py, array)).collect::<PyResult<Vec<_>>>()?;
    Ok(py.detach(|| {
        let numbers: Vec<_> = lent.iter().map(Lent::unchanged_since).collect();
        let others = lent.iter().zip(&numbers).filter(|(_, number)| number.is_none());
        let mut hashes = hashes_of(&others.map(|(lent, _)| lent).collect::<Vec<_>>()).into_iter();
        let look = |(lent, number): (&Lent, Option<u64>)| match number {
            Some(number) => (true, number),
            None => {
                let hash = hashes.next().expect("each of the others has a hash");
                lent.unchanged_with(hash).map_or((false, hash), |number| (true, number))
            }
        };
        lent.iter().zip(numbers).map(look).collect()
    }))
}

fn hashes_of(lent: &[&Lent]) -> Vec<u64> {
    zeroshard_client::hashes(&lent.iter().map(|lent| lent.as_ref()).collect::<Vec<_>>())
}
