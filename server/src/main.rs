//! `zeroshard-server`: see `--help`.

use std::{process::ExitCode, time::Duration};

use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;
use zeroshard_net::trace;
use zeroshard_server::{
    cli::{self, Command},
    config::{self, Config},
    dev_certs::{self, DevCerts},
    failure, logging,
    probe::Probe,
    roles,
    shutdown::stop_on_signals,
};

/// The time for the remaining tasks after a role has ended, in addition to the drain time.
const LAST_TASKS: Duration = Duration::from_millis(100);

/// A network buffer of a megabyte is allocated and freed with every frame. glibc returns its pages
/// to the system each time, and faulting them in again takes as long as receiving into them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let config = match cli::read(std::env::args_os()) {
        Ok(Command::Serve(config)) => config,
        Ok(Command::Probe(probe)) => return end(ask(&probe), |error| eprintln!("{error}")),
        Ok(Command::DevCerts(certs)) => return end(make(&certs), |error| eprintln!("{error}")),
        Err(config::Error::CommandLine(error)) => error.exit(),
        Err(error) => {
            eprintln!("zeroshard-server: {error}");
            return ExitCode::from(2);
        }
    };
    logging::start(&config.common);
    failure::abort_on_panic();
    end(run(*config), |error| tracing::error!("{error}"))
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// The exit code of the process. Reports an error.
fn end(outcome: Outcome, report: impl FnOnce(Box<dyn std::error::Error>)) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(error);
            ExitCode::FAILURE
        }
    }
}

fn ask(probe: &Probe) -> Outcome {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(probe.ask())?)
}

fn make(certs: &DevCerts) -> Outcome {
    let files = certs.make()?;
    Ok(dev_certs::print(certs.directory(), &files)?)
}

fn run(config: Config) -> Outcome {
    let runtime = Runtime::new()?;
    let result = runtime.block_on(async {
        let shutdown = CancellationToken::new();
        stop_on_signals(shutdown.clone())?;
        Ok(roles::run(config, shutdown).await?)
    });
    runtime.shutdown_timeout(LAST_TASKS);
    trace::flush();
    result
}
