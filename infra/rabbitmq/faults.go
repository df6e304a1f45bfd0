package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"mailproof/infra"
)

var errNoSuchNode = errors.New("it is no node of this cluster")

func (c *Cluster) own(n infra.Node) (*Member, error) {
	i := slices.IndexFunc(c.Members, func(m *Member) bool { return infra.Node(m) == n })
	if i < 0 {
		return nil, fmt.Errorf("%s: %w", n.Name(), errNoSuchNode)
	}
	return c.Members[i], nil
}

func (c *Cluster) peers(n *Member) []*Member {
	return slices.DeleteFunc(slices.Clone(c.Members), func(other *Member) bool { return other == n })
}

// eval runs Erlang on a node and returns what it evaluates to, as text.
func (c *Cluster) eval(ctx context.Context, n *Member, expression string) (string, error) {
	out, err := c.ctl(ctx, n, "eval", expression)
	return strings.TrimSpace(string(out)), err
}

// CutOff needs no privilege and no proxy: both sides are told to use another
// cookie for the other, each its own, so that neither can connect again, and
// then the node drops all its connections in one step. In two steps
// pause_minority would see a partial partition, and pause a node of the
// majority too; and with the same wrong cookie on both sides they would find
// together again at once.
func (c *Cluster) CutOff(ctx context.Context, n infra.Node) error {
	cut, err := c.own(n)
	if err != nil {
		return fmt.Errorf("cut off: %w", err)
	}
	if err := c.setCookies(ctx, cut, "cut_off_here", "cut_off_there"); err != nil {
		return errors.Join(fmt.Errorf("cut off %s: %w", cut.Name(), err), c.Rejoin(context.WithoutCancel(ctx), n))
	}
	drop := "lists:foreach(fun(P) -> erlang:disconnect_node(P) end, " + erlangNodes(c.peers(cut)) + ")."
	if _, err := c.eval(ctx, cut, drop); err != nil {
		return errors.Join(fmt.Errorf("cut off %s: %w", cut.Name(), err), c.Rejoin(context.WithoutCancel(ctx), n))
	}
	if err := c.awaitAside(ctx, cut); err != nil {
		return errors.Join(fmt.Errorf("cut off %s: %w", cut.Name(), err), c.Rejoin(context.WithoutCancel(ctx), n))
	}
	return nil
}

// setCookies tells the node which cookie to use for each peer, and each peer
// which to use for the node; the empty word is the cluster's own.
func (c *Cluster) setCookies(ctx context.Context, cut *Member, here, there string) error {
	setting, ctx := errgroup.WithContext(ctx)
	setting.Go(func() error {
		_, err := c.eval(ctx, cut, setCookie(c.peers(cut), here))
		return err
	})
	for _, peer := range c.peers(cut) {
		if !peer.Running() { // a start reads the cluster's cookie
			continue
		}
		setting.Go(func() error {
			_, err := c.eval(ctx, peer, setCookie([]*Member{cut}, there))
			return err
		})
	}
	return setting.Wait()
}

func setCookie(nodes []*Member, cookie string) string {
	value := "erlang:get_cookie()"
	if cookie != "" {
		value = cookie
	}
	return "C = " + value + ", lists:foreach(fun(P) -> erlang:set_cookie(P, C) end, " + erlangNodes(nodes) + ")."
}

func erlangNodes(nodes []*Member) string {
	names := make([]string, len(nodes))
	for i, n := range nodes {
		names[i] = "'" + n.Erlang + "'"
	}
	return "[" + strings.Join(names, ",") + "]"
}

// awaitAside waits until a node has stopped serving by itself.
func (c *Cluster) awaitAside(ctx context.Context, n *Member) error {
	ctx, cancel := context.WithTimeout(ctx, settleBound)
	defer cancel()
	for {
		if c.Ask(ctx, n) != nil && ctx.Err() == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it still serves: %w", ctx.Err())
		case <-time.After(askEvery):
		}
	}
}

// Rejoin sets the cookies back; the node asks for its peers by itself.
func (c *Cluster) Rejoin(ctx context.Context, n infra.Node) error {
	cut, err := c.own(n)
	if err != nil {
		return fmt.Errorf("rejoin: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, rejoinBound)
	defer cancel()
	if err := c.setCookies(ctx, cut, "", ""); err != nil {
		return fmt.Errorf("rejoin %s: %w", cut.Name(), err)
	}
	if err := c.awaitWhole(ctx); err != nil {
		return fmt.Errorf("rejoin %s: %w", cut.Name(), err)
	}
	return nil
}

// Mend undoes cuts, waits until the cluster is whole, and ends alarms: a node that
// has stepped aside takes no order about its memory. Every node must run.
func (c *Cluster) Mend(ctx context.Context) error {
	whole, cancel := context.WithTimeout(ctx, rejoinBound)
	defer cancel()
	if err := c.each(whole, func(ctx context.Context, m *Member) error {
		_, err := c.eval(ctx, m, setCookie(c.peers(m), ""))
		return err
	}); err != nil {
		return err
	}
	if err := c.awaitWhole(whole); err != nil {
		return err
	}
	return c.each(ctx, func(ctx context.Context, m *Member) error { return c.Alarm(ctx, m, false) })
}

// each acts on all members side by side.
func (c *Cluster) each(ctx context.Context, act func(context.Context, *Member) error) error {
	acting, ctx := errgroup.WithContext(ctx)
	for _, m := range c.Members {
		acting.Go(func() error {
			if err := act(ctx, m); err != nil {
				return fmt.Errorf("%s: %w", m.Name(), err)
			}
			return nil
		})
	}
	return acting.Wait()
}

// awaitWhole waits until each node serves and sees every other.
func (c *Cluster) awaitWhole(ctx context.Context) error {
	for {
		err := c.whole(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(askEvery):
		}
	}
}

func (c *Cluster) ask(ctx context.Context, m *Member) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return c.Ask(ctx, m)
}

func (c *Cluster) whole(ctx context.Context) error {
	for _, n := range c.Members {
		if err := c.ask(ctx, n); err != nil {
			return fmt.Errorf("%s does not serve: %w", n.Name(), err)
		}
	}
	running, err := c.runningNodes(ctx)
	if err == nil && len(running) != len(c.Members) {
		err = fmt.Errorf("running: %v", running)
	}
	return err
}

// Alarm sets the watermark of a node's memory to nothing, and back.
func (c *Cluster) Alarm(ctx context.Context, n infra.Node, on bool) error {
	own, err := c.own(n)
	if err != nil {
		return fmt.Errorf("memory alarm: %w", err)
	}
	limit := []string{"absolute", MemoryLimit}
	if on {
		limit = []string{"0"}
	}
	if _, err := c.ctl(ctx, own, append([]string{"set_vm_memory_high_watermark"}, limit...)...); err != nil {
		return fmt.Errorf("memory alarm of %s: %w", own.Name(), err)
	}
	return nil
}

// MoveLeader asks the leader to hand over. It may refuse while the next one is
// behind, and is asked again.
func (c *Cluster) MoveLeader(ctx context.Context, vhost, queue string, to infra.Node) error {
	next, err := c.own(to)
	if err != nil {
		return fmt.Errorf("leader of queue %s: %w", queue, err)
	}
	expression := fmt.Sprintf(`{ok, Q} = %s,
		{Name, _} = amqqueue:get_pid(Q),
		ra:transfer_leadership(ra_leaderboard:lookup_leader(Name), {Name, '%s'}).`, lookup(vhost, queue), next.Erlang)
	ctx, cancel := context.WithTimeout(ctx, settleBound)
	defer cancel()
	for {
		said, err := c.ctlAny(ctx, "eval", expression)
		if err != nil {
			return fmt.Errorf("leader of queue %s to %s: %w", queue, next.Name(), err)
		}
		leader, err := c.Leader(ctx, vhost, queue)
		if err == nil && leader == to {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("leader of queue %s to %s: the broker says %s: %w", queue, next.Name(), strings.TrimSpace(string(said)), ctx.Err()), err)
		case <-time.After(askEvery):
		}
	}
}

// CancelConsumers sends each channel that consumes from the queue the message
// that a quorum queue's leader sends at its end. A channel would then consume
// anew by itself, since the queue is there, unless its consumer has asked to be
// told instead (x-cancel-on-ha-failover): that is put into its state first.
// Nothing gentler makes a broker cancel the consumers of a quorum queue that
// goes on: they outlive its leaders, and on RabbitMQ 3.10 to 4.2 a consumer that
// is late costs its channel.
func (c *Cluster) CancelConsumers(ctx context.Context, vhost, queue string) (int, error) {
	said, err := c.ctlAny(ctx, "eval", fmt.Sprintf(`{ok, Q} = %s,
		{Name, _} = amqqueue:get_pid(Q),
		Leader = ra_leaderboard:lookup_leader(Name),
		Told = {<<"x-cancel-on-ha-failover">>, bool, true},
		Consumer = fun(_, {In, {NoAck, Prefetch, Exclusive, Args}}) when is_list(Args) ->
				{In, {NoAck, Prefetch, Exclusive, [Told | Args]}};
			(_, Other) -> Other end,
		Field = fun(F) when is_map(F) -> maps:map(Consumer, F); (F) -> F end,
		Channel = fun(S) when is_tuple(S), element(1, S) =:= ch -> list_to_tuple(lists:map(Field, tuple_to_list(S))); (S) -> S end,
		Server = fun(S) -> list_to_tuple(lists:map(Channel, tuple_to_list(S))) end,
		Channels = lists:usort([element(1, C) || C <- rabbit_amqqueue:consumers(Q)]),
		lists:foreach(fun(C) ->
			sys:replace_state(C, Server),
			gen_server:cast(C, {queue_event, amqqueue:get_name(Q), {Leader, {machine, eol}}})
		end, Channels),
		length(Channels).`, lookup(vhost, queue)))
	if err != nil {
		return 0, fmt.Errorf("cancel the consumers of queue %s: %w", queue, err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(said)))
	if err != nil {
		return 0, fmt.Errorf("cancel the consumers of queue %s: the broker says %q", queue, said)
	}
	return n, nil
}
