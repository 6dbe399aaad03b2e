"""Ceph's S3 gateway with its backend: a monitor, and one store that keeps its objects in memory."""

import uuid

from tests.support.servers.processes import Port, wait_until
from tests.support.servers.programs import S3Server

CONF = """
[global]
fsid = {fsid}
mon initial members = a
mon host = v1:127.0.0.1:{mon_port}
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
admin socket =
run dir = {home}
mon data = {home}/mon
osd data = {home}/osd
rgw data = {home}/rgw
log file = {home}/$name.log

# One store, and what is in it exists once.
osd objectstore = memstore
memstore device bytes = 8589934592
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
osd crush chooseleaf type = 0
# Without authentication, what the store would tell the monitor of itself as it starts is refused at times.
osd class update on start = false
osd crush update on start = false

# Decisions are taken at once: there is one voice.
paxos propose interval = 0.02
paxos min wait = 0.01
mon tick interval = 1

rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable usage log = false
# With a cache it would wait for the one that was killed, half a minute, before it changed anything.
rgw cache enabled = false
rgw enable lc threads = false
rgw enable quota threads = false
rgw dynamic resharding = false
rgw override bucket index max shards = 1
rgw thread pool size = 64
"""


class Ceph(S3Server):
    """An S3 server. ``kill`` and ``start`` affect only the gateway: stored objects stay."""

    def __init__(self, processes, home):
        super().__init__(processes, home)
        self.mon_port = Port()
        self.behind = []

    def start(self):
        """Start the server, or start its gateway again."""
        if not self.behind:
            self.make_cluster()
        self.run(self.with_conf("radosgw", "-f", "-n", "client.rgw"))

    def close(self):
        """End all programs."""
        super().close()
        for process in reversed(self.behind):
            self.processes.kill(process)
        self.mon_port.close()

    def make_cluster(self):
        """Start the gateway's storage, and create its user."""
        home, fsid = self.home, str(uuid.uuid4())
        for folder in ("mon", "osd", "rgw"):
            (home / folder).mkdir()
        ports = {"port": self.port.number, "mon_port": self.mon_port.number}
        (home / "ceph.conf").write_text(CONF.format(home=home, fsid=fsid, **ports))
        address = f"[v1:127.0.0.1:{self.mon_port.number}]"
        self.do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, home / "monmap")
        # The monitor knows its only store from the beginning, so that it need not be registered.
        self.do("osdmaptool", "--createsimple", "1", home / "osdmap")
        self.do("ceph-mon", "-i", "a", "--mkfs", "--monmap", home / "monmap", "--osdmap", home / "osdmap")
        self.put_behind("ceph-mon", "-i", "a", "-f", ready=self.mon_port.answers)
        self.do("ceph-osd", "-i", "0", "--mkfs")
        self.put_behind("ceph-osd", "-i", "0", "-f")
        names = ["--uid=shardkit", "--display-name=shardkit", f"--access-key={self.key}", f"--secret={self.secret}"]
        self.do("radosgw-admin", "user", "create", *names)

    def with_conf(self, program, *arguments):
        """Return a command of a program of Ceph's."""
        return [program, "-c", self.home / "ceph.conf", *arguments]

    def do(self, program, *arguments):
        """Run a program to its end."""
        self.processes.run(self.with_conf(program, *arguments), self.home / "said.log")

    def put_behind(self, program, *arguments, ready=lambda: True):
        """Start a program that the gateway needs."""
        log = self.home / "said.log"
        process = self.processes.start(self.with_conf(program, *arguments), log)
        self.behind.append(process)
        wait_until(ready, process, log)
