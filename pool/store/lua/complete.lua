-- complete: end a running job, once: the rest of its log, its terminal fields, the ack and the delete, together.
-- KEY job hash
-- KEY log list
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY outbox zset
-- KEY timers zset
-- KEY tombstone string
-- KEY tally list
-- KEY tenants zset
-- KEYS blocks hash those of its input, in order
-- ARG token str
-- ARG attempt str
-- ARG nonce str
-- ARG first_seq tokens logged before the first of these
-- ARG count tokens in these entries
-- ARG entries list
-- ARG state str terminal state
-- ARG ttl ms
-- ARG fields list name, value ... of the terminal record
-- INCLUDE clock kept inputs lanes withdrawing entries charge finish
-- FLAGS allow-oom
-- RETURN {"ok", watch} | {"resend", log end} | {"stale", state} | {"gone"}
local seen = redis.call('HMGET', job, unpack(ENDING))
if not seen[1] then return {'gone'} end
-- The fence, as in lib/fence.lua, on fields that the ending needs anyway.
if seen[1] ~= 'running' or seen[9] ~= attempt or seen[10] ~= nonce then return {'stale', seen[1]} end
if seen[18] then return redis.error_reply('ERR program_complete ends the jobs of Programs') end
-- Its hand-out named them; a caller that forgot must not look like one whose attempt is over.
if undeclared(seen[11], blocks) then return redis.error_reply('ERR complete must declare the input blocks') end
local logged = tonumber(seen[8] or 0)
if first_seq ~= logged then return {'resend', logged} end
for i = 1, #entries, 1000 do
  redis.call('RPUSH', log, unpack(entries, i, math.min(i + 999, #entries)))
end
fields[#fields + 1] = 'tokens'
fields[#fields + 1] = logged + count
seen[8] = logged + count
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
return {'ok', (finish(keys, token, seen, state, ttl, now_ms(), fields))}
