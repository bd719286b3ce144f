package pgserver

import (
	"context"
	"os/exec"
)

// StartOrphan runs a postmaster without an owner on the data folder of a stopped server. It closes the channel when
// the postmaster has ended.
func StartOrphan(dir string) (<-chan struct{}, error) {
	s := &Server{cfg: Config{DataDir: dir}}
	if err := s.cfg.validate(); err != nil {
		return nil, err
	}
	s.logger = s.cfg.Logger
	var err error
	if s.user, err = unprivilegedAccount(); err != nil {
		return nil, err
	}
	if err := s.openFolder(); err != nil {
		return nil, err
	}
	defer func() { _ = s.release() }()
	bins, err := findBinaries(context.Background(), s.cfg, s.user, clusterVersion(s.clusterDir()))
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(bins.postgres, "-D", s.pathForPostgres(), "-c", "listen_addresses=", "-c", "unix_socket_directories=")
	s.tail = &outputWriter{logger: s.logger}
	s.prepareCommand(cmd)
	proc, err := startProcess(cmd)
	if err != nil {
		return nil, err
	}
	for !isPostmasterOf(proc.pid(), s.clusterDir()) {
		select {
		case <-proc.done:
			return nil, proc.err
		default:
		}
	}
	return proc.done, nil
}

// OnBareMachine returns c for a machine that has no Postgres and has not downloaded one.
func (c Config) OnBareMachine(fetchDir string) Config {
	c.search, c.FetchDir = []string{}, fetchDir
	return c
}
