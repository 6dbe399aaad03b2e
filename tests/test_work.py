"""Tasks in processes leave the terminal to their caller."""

import signal

from shardkit.work import Workers


class BlockedSignals:
    def run(self, _stop):
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_never_sees_ctrl_c_not_even_while_it_starts():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    in_processes = list(Workers(num_workers=2, worker_type="process").run([BlockedSignals()] * 4))

    assert all(signal.SIGINT in blocked for blocked in in_processes)
    assert signal.SIGINT not in before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
