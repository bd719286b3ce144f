package harness

import (
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"
)

func TestParseStat_ReadsNameWithSpacesAndParentheses(t *testing.T) {
	t.Parallel()
	p, err := parseProcStat([]byte("42 (a ) (b) S 7 42 42 0 -1 4194304 100 200 0 0 3 4 5 6 20 0 1 0 99 1000 10 18446744073709551615\n"))
	if want := (Process{PID: 42, Parent: 7, CPU: 180 * time.Millisecond}); err != nil || p != want {
		t.Errorf("%+v, %v, want %+v", p, err, want)
	}
	for _, bad := range []string{"", "42 (a", "42 (a) S 7", "42 (a) S x 42 42 0 -1 4194304 100 200 0 0 3 4 5 6"} {
		if _, err := parseProcStat([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestProcesses_ContainChildrenWithTimeAndMemory(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc of Linux")
	}
	// The shell has a child of its own, and the pipe blocks both until the end of the test.
	cmd := exec.Command("sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo spun; cat; :")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	all, err := Processes(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	shell, others := SplitSubtree(all, cmd.Process.Pid)
	if len(shell) == 0 || shell[0].PID != cmd.Process.Pid || len(others) == 0 || others[0].PID != os.Getpid() {
		t.Fatalf("processes of the shell %+v, others %+v", shell, others)
	}
	if TotalCPU(shell) == 0 || TotalMemory(shell) == 0 || TotalMemory(others) < TotalMemory(shell) {
		t.Errorf("processor time %s, memory %d; memory of this process %d", TotalCPU(shell), TotalMemory(shell), TotalMemory(others))
	}
	if machine, err := MachineCPU(); err != nil || machine < TotalCPU(all) {
		t.Errorf("processor time of the machine %s, %v; of this process and its children %s", machine, err, TotalCPU(all))
	}
	if _, err := Processes(-1); err == nil {
		t.Error("a process that does not exist was found")
	}
}
