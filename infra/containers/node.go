package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	apinetwork "github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tcexec "github.com/testcontainers/testcontainers-go/exec"

	"mailproof/infra"
)

const (
	// probeEvery is the pause between two questions to a starting server.
	probeEvery = 100 * time.Millisecond
	// probeTimeout bounds one question.
	probeTimeout = 3 * time.Second
	// restartTimeout bounds a restart, with the recovery that it includes.
	restartTimeout = 2 * time.Minute
	// stopWait is how long a server may take to stop by itself in a restart.
	stopWait = 30 * time.Second
)

var infoOptions = client.InfoOptions{}

// node is one server in a container of its own.
type node struct {
	name      string
	path      string // of the log
	log       *os.File
	engine    *testcontainers.DockerClient
	container *testcontainers.DockerContainer
	// probe asks the server whether it serves.
	probe func(context.Context) error

	acting sync.Mutex // one act at a time

	mu              sync.Mutex
	pid             int
	running, paused bool
}

var _ infra.Node = (*node)(nil)

// server is what a node runs.
type server struct {
	name  string
	image string
	user  string
	// script is run by /bin/sh; it must end by replacing itself with the server.
	script string
	env    map[string]string
	files  map[string]string // path → content
	port   int               // in the container
	// onHost is the port of loopback that leads to it.
	onHost int
	// stopSignal asks the server for a clean stop.
	stopSignal string
}

// add creates the container of a server, without starting it. Whatever happens
// then, the stack removes it.
func (e *environment) add(ctx context.Context, v server, probe func(context.Context) error) (*node, error) {
	log, err := os.Create(e.log(v.name))
	if err != nil {
		return nil, err
	}
	n := &node{name: v.name, path: log.Name(), log: log, engine: e.stack.engine, probe: probe}
	e.stack.mu.Lock()
	e.stack.nodes = append(e.stack.nodes, n)
	e.stack.mu.Unlock()
	port, err := apinetwork.ParsePort(strconv.Itoa(v.port) + "/tcp")
	if err != nil {
		return nil, err
	}
	options := []testcontainers.ContainerCustomizer{
		testcontainers.WithNoStart(),
		testcontainers.WithEntrypoint("/bin/sh", "-c", v.script),
		testcontainers.WithCmd(),
		testcontainers.WithEnv(v.env),
		testcontainers.WithLogConsumers(n),
		testcontainers.WithExposedPorts(port.String()),
		testcontainers.WithConfigModifier(func(c *container.Config) {
			c.User, c.Hostname, c.StopSignal = v.user, v.name, v.stopSignal
		}),
		testcontainers.WithHostConfigModifier(func(h *container.HostConfig) {
			h.PortBindings = apinetwork.PortMap{port: {{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: strconv.Itoa(v.onHost)}}}
		}),
		networked(e.stack.network, v.name),
	}
	for path, content := range v.files {
		options = append(options, testcontainers.WithFiles(testcontainers.ContainerFile{
			Reader: strings.NewReader(content), ContainerFilePath: path, FileMode: 0o644,
		}))
	}
	n.container, err = testcontainers.Run(ctx, v.image, options...)
	if err != nil {
		return nil, fmt.Errorf("container of %s: %w", v.name, err)
	}
	return n, nil
}

// networked puts a container on the stack's network under its name.
func networked(nw *testcontainers.DockerNetwork, alias string) testcontainers.CustomizeRequestOption {
	return func(req *testcontainers.GenericContainerRequest) error {
		req.Networks = []string{nw.Name}
		req.NetworkAliases = map[string][]string{nw.Name: {alias}}
		return nil
	}
}

// Accept writes what the server prints to the node's log.
func (n *node) Accept(l testcontainers.Log) { _, _ = n.log.Write(l.Content) }

func (n *node) Name() string { return n.name }

func (n *node) Log() string { return n.path }

// PID of the server's first process, as the engine's machine knows it.
func (n *node) PID() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pid
}

// Running asks the engine: a server may have ended by itself.
func (n *node) Running() bool {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	_, err := n.inspect(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	return err == nil && n.running
}

// Serving reports whether it runs and is not paused.
func (n *node) Serving() bool {
	running := n.Running()
	n.mu.Lock()
	defer n.mu.Unlock()
	return running && !n.paused
}

func (n *node) inspect(ctx context.Context) (*container.State, error) {
	if n.container == nil {
		return nil, errors.New("it has no container")
	}
	state, err := n.container.State(ctx)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.running, n.paused, n.pid = state.Running, state.Paused, state.Pid
	return state, nil
}

// launch starts the container and waits until the server answers.
func (n *node) launch(ctx context.Context) error {
	if err := n.container.Start(ctx); err != nil {
		return fmt.Errorf("%s: %w", n.name, err)
	}
	if err := n.await(ctx); err != nil {
		return fmt.Errorf("%s does not answer: %w\nits log is %s", n.name, err, n.path)
	}
	return nil
}

func (n *node) await(ctx context.Context) error {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		err := n.ask(ctx)
		if err == nil {
			_, err = n.inspect(ctx)
			return err
		}
		if state, broken := n.inspect(ctx); broken == nil && !state.Running {
			return fmt.Errorf("the server has ended with exit code %d", state.ExitCode)
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}

func (n *node) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return n.probe(ctx)
}

// Kill ends all processes of the container with SIGKILL.
func (n *node) Kill(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	return n.kill(ctx)
}

func (n *node) kill(ctx context.Context) error {
	state, err := n.inspect(ctx)
	if err != nil {
		return fmt.Errorf("kill %s: %w", n.name, err)
	}
	if !state.Running {
		return nil
	}
	if state.Paused { // the engine signals no frozen container
		if err := n.unpause(ctx); err != nil {
			return err
		}
	}
	if _, err := n.engine.ContainerKill(ctx, n.container.GetContainerID(), client.ContainerKillOptions{Signal: "KILL"}); err != nil {
		return fmt.Errorf("kill %s: %w", n.name, err)
	}
	return n.awaitEnd(ctx)
}

func (n *node) awaitEnd(ctx context.Context) error {
	for {
		state, err := n.inspect(ctx)
		if err != nil {
			return fmt.Errorf("end of %s: %w", n.name, err)
		}
		if !state.Running {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has not ended: %w", n.name, ctx.Err())
		case <-time.After(probeEvery / 5):
		}
	}
}

// Pause freezes all processes of the container.
func (n *node) Pause(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	n.mu.Lock()
	n.paused = true // before the act: nobody must be sent to a node that is about to stop
	n.mu.Unlock()
	if _, err := n.engine.ContainerPause(ctx, n.container.GetContainerID(), client.ContainerPauseOptions{}); err != nil {
		_, inspecting := n.inspect(ctx)
		return errors.Join(fmt.Errorf("pause %s: %w", n.name, err), inspecting)
	}
	return nil
}

// Resume lets them run again.
func (n *node) Resume(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	state, err := n.inspect(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("resume %s: %w", n.name, err)
	case !state.Running:
		return fmt.Errorf("resume %s: it does not run", n.name)
	case !state.Paused:
		return nil // the engine would call it an error
	}
	return n.unpause(ctx)
}

func (n *node) unpause(ctx context.Context) error {
	if _, err := n.engine.ContainerUnpause(ctx, n.container.GetContainerID(), client.ContainerUnpauseOptions{}); err != nil {
		return fmt.Errorf("resume %s: %w", n.name, err)
	}
	_, err := n.inspect(ctx)
	return err
}

// Restart starts the server on the data and ports that it had.
func (n *node) Restart(ctx context.Context) error {
	n.acting.Lock()
	defer n.acting.Unlock()
	ctx, cancel := context.WithTimeout(ctx, restartTimeout)
	defer cancel()
	if err := n.end(ctx); err != nil {
		return fmt.Errorf("restart %s: %w", n.name, err)
	}
	if err := n.launch(ctx); err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	return nil
}

// end stops a server that runs, by itself if it can.
func (n *node) end(ctx context.Context) error {
	state, err := n.inspect(ctx)
	if err != nil || !state.Running {
		return err
	}
	if state.Paused {
		if err := n.unpause(ctx); err != nil {
			return err
		}
	}
	wait := stopWait
	if err := n.container.Stop(ctx, &wait); err != nil {
		return err
	}
	_, err = n.inspect(ctx)
	return err
}

// remove ends the container and takes its data away.
func (n *node) remove(ctx context.Context) error {
	if n.container == nil {
		return n.log.Close()
	}
	n.acting.Lock()
	defer n.acting.Unlock()
	err := n.kill(ctx) // no server needs to tidy up what is thrown away
	if gone := n.container.Terminate(ctx, testcontainers.StopTimeout(0)); gone != nil {
		return errors.Join(err, gone)
	}
	return n.log.Close()
}

// run executes a program in the container and returns what it prints.
func (n *node) run(ctx context.Context, program ...string) ([]byte, error) {
	code, out, err := n.container.Exec(ctx, program, tcexec.Multiplexed())
	if err != nil {
		return nil, fmt.Errorf("%s in %s: %w", program[0], n.name, err)
	}
	said, err := io.ReadAll(out)
	if err != nil {
		return nil, fmt.Errorf("%s in %s: %w", program[0], n.name, err)
	}
	if code != 0 {
		return nil, fmt.Errorf("%s in %s: exit status %d: %s", program[0], n.name, code, strings.TrimSpace(string(said)))
	}
	return said, nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
