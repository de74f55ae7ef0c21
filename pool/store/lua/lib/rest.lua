-- What becomes of a Program when one of its jobs ends.

-- All of this generation goes; its number is remembered. The caller has nothing left to save.
local function release(at, p, reason)
  if p.state == 'active' then vacate(at, p) end
  leave_waiting(at, p)
  redis.call('ZREM', at.timers, 'ttl:' .. p[0].id, 'retention:' .. p[0].id)
  redis.call('DEL', p[0].key, p[0].pool)
  if redis.call('HINCRBY', at.owners, p.tenant, -1) == 0 then redis.call('HDEL', at.owners, p.tenant) end
  redis.call('SET', p[0].gone, p.gen, 'PX', math.max(p.keep, 60000))
  event(at, 'release', p, reason)
  p[0].released = true
end

-- A job that was with the rank has ended: `how` is completed, or the reason to pause. `ended`: its ttl, the automatic part
-- of it, and `ends`, that the Program is over; `front`: key of the job that its pool begins with, if it does.
local function rest(at, p, token, how, ended, front)
  returned(at, p, token)
  -- Nothing has come after it: the others were there before it said that it was the last.
  if ended.ends and p.last == token then p.ending = 1 end
  local ticket = p.inflight == 0 and redis.call('LINDEX', p[0].pool, 0)
  if p.inflight > 0 then return account(at, p) end
  local stale, id = is_stale(at, p), p[0].id
  if ticket and not stale then
    redis.call('LPOP', p[0].pool)
    p.mark = nil
    dispatch(at, p, ticket, front)
    return event(at, 'continue', p, 'successor')
  end
  p.status = 'acting'
  account(at, p)
  if not ticket and (p.ending or ended.ends) then return release(at, p, 'finished') end
  if not ticket and how ~= 'completed' and not p.completed then return release(at, p, how) end
  if stale then return pause(at, p, lost_why(at)) end
  if how == 'completed' and p.bind ~= 1 then measured(at, 'armed_ttl_ms', ended.ttl) end
  if p.bind == 1 then
    redis.call('ZADD', at.timers, at.ms + p.keep, 'retention:' .. id)
  elseif how == 'completed' and not p.mark and ended.ttl > 0 then
    p.ttl_ms, p.auto_ms = at.ms + ended.ttl, at.ms + ended.automatic
    redis.call('ZADD', at.timers, p.ttl_ms, 'ttl:' .. id)
  else
    return pause(at, p, p.mark and 'capacity_repair' or how == 'completed' and 'ttl_expired' or how)
  end
  event(at, 'rest', p, how)
end

-- A job has ended that waited in the pool.
local function withdraw(at, p, ticket, how)
  redis.call('LREM', p[0].pool, 1, ticket)
  -- One that is active has jobs with the rank; the last of them decides.
  if p.state == 'active' then return end
  if redis.call('LLEN', p[0].pool) == 0 and (p.ending or not p.completed) then
    return release(at, p, p.ending and 'finished' or how)
  end
  settle_paused(at, p)
end
