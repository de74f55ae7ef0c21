-- What an arriving request does to its Program.

-- Whether it is idle on a rank that lost it, or bound to one that is away while another is up.
local function must_move(at, p, elsewhere)
  local seat = redis.call('HGET', at.book, 'incarnation')
  if p.state == 'active' then return p.seat ~= seat and p.inflight == 0 end
  return elsewhere == 1 and not p.standing and (not seat or seat == '')
end

local function arrived(at, p, facts, first, tokens)
  if not p.state then
    p.gen = tonumber(redis.call('GET', p[0].gone) or -1) + 1
    p.state, p.status, p.rank, p.ctx, p.inflight, p.private = 'paused', 'acting', at.rank, 0, 0, 0
    learn(p, first)
    redis.call('DEL', p[0].gone)
    redis.call('HINCRBY', at.owners, p.tenant, 1)
    event(at, 'create', p, 'arrival')
  end
  local step = p.step or -1
  p.ending, p.last = nil, nil
  learn(p, facts)
  if p.step < 0 then p.step = step + 1 end
  -- An estimate rises at once; that it is smaller says nothing.
  if tokens > p.ctx then p.ctx, p.falls = tokens, nil end
  -- It returns to the rank that it left: a sample of the continuity window.
  if p.impact_us and p.inflight == 0 and not p.standing then
    local ms = measured(at, 'request_interval_ms', math.max(at.ms - p.finish_ms, 0))
    sampled(at.continuity, struct.pack('<ff', ms / 1000, p.impact_us / 1000000), p.win)
    p.impact_us = nil
  end
end

-- To the rank, where the Program has its place and is not to leave it; where Programs are only bound, it gets one at once.
local function place_job(at, p, ticket, job, force, deadline_force)
  local seat, free = redis.call('HGET', at.book, 'incarnation'), redis.call('LLEN', p[0].pool) == 0
  local what, why = 'continue', 'arrival'
  p.patience = force
  if p.bind == 1 and p.state == 'paused' and seat and seat ~= '' and free then
    activate(at, p, seat, redis.call('HGET', at.leaving, p[0].id) or 0)
    what, why = 'admit', 'bound'
  end
  if p.state == 'active' and not p.mark and p.seat == seat and free then
    dispatch(at, p, ticket, job)
    event(at, what, p, why)
    return 'dispatched'
  end
  redis.call('RPUSH', p[0].pool, ticket)
  if not p.mark then account(at, p) end
  if p.state == 'active' then return 'waiting' end
  -- A later request never postpones what was set; a deadline of its own may only shorten it.
  local force_ms = p.force_ms or at.ms + force
  if deadline_force > 0 then force_ms = math.min(force_ms, at.ms + deadline_force) end
  p.force_ms = force_ms
  if p.standing then keep_waiting(at, p) else wait(at, p, ticket) end
  return 'waiting'
end
