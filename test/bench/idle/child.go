package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/test/bench/system"
)

// process is this program in another role. It ends with its input.
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	said string // its one line
}

// child starts one, gives it lines, and waits for what it says.
func child(role, at string, lines []string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(self, "-role", role, "-at", at)} //nolint:gosec // this program
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	if len(lines) > 0 {
		_, err = io.WriteString(p.in, strings.Join(lines, "\n")+"\n\n")
	}
	if err == nil {
		p.said, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", role, err), p.end())
	}
	p.said = strings.TrimSpace(p.said)
	return p, nil
}

func (p *process) end() error { return errors.Join(p.in.Close(), p.cmd.Wait()) }

// serveNATS runs a server until the input ends. It leaves syncing to its timer: how fast sessions are made is not measured here.
func serveNATS(dir string) error {
	srv, err := natsserver.Start(natsserver.Config{StoreDir: filepath.Join(dir, "nats"), Port: natsserver.RandomPort, Relaxed: true})
	if err != nil {
		return err
	}
	defer srv.Shutdown()
	if _, err := fmt.Println(srv.ClientURL()); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// openSockets joins the sessions that the input names, up to an empty line, and keeps them until the input ends.
func openSockets(ctx context.Context, url string) error {
	in := bufio.NewReader(os.Stdin)
	c := system.NewClient(url)
	var group errgroup.Group
	group.SetLimit(16)
	for {
		id, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		if id = strings.TrimSpace(id); id == "" {
			break
		}
		group.Go(func() error {
			try, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			s, err := c.Join(try, id)
			if err != nil {
				return err
			}
			// What came before the join is read.
			for seq := uint32(0); seq < s.Tip; {
				w, _, err := s.Next(try)
				if err != nil {
					return err
				}
				seq = w.Seq
			}
			go func() { // answers pings until this process ends
				defer s.Close()
				_, _, _ = s.Next(ctx)
			}()
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if _, err := fmt.Println("joined"); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, in)
	return err
}
