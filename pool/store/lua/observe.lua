-- observe: install what a rank's engine reported, and take note of KV that is gone. A report of another process, of other
-- ranks, or older than the one that is in changes nothing.
-- KEY members zset
-- ARG rank str
-- ARG incarnation str
-- ARG rank_set str version of the set of ranks it was begun with
-- ARG began ms when the look at the engine began
-- ARG moved num the book's `moved` then
-- ARG tokens str resident, "" for unknown
-- ARG waiting num requests inside the engine
-- ARG running num
-- ARG ids list Programs whose KV was leaving then, and is gone; at most 100
-- INCLUDE clock book
-- FLAGS allow-oom
-- RETURN {"ok", version} | {"dropped"} | {"other"}: the rank is another process
at.rank, at.ms = rank, now_ms()
local book = redis.call('HMGET', at.book, 'incarnation', 'obs_began_ms', 'moved')
if book[1] ~= incarnation then return {'other'} end
redis.call('ZADD', members, at.ms, rank)
if (redis.call('HGET', at.placement, 'ranks') or '0') ~= rank_set then return {'dropped'} end
-- A clock that was set back makes a look that began later seem older: then the one that is in is from the future.
if book[2] and tonumber(book[2]) > began and tonumber(book[2]) <= at.ms then return {'dropped'} end
redis.call('HSET', at.book, 'obs_began_ms', began, 'obs_tokens', tokens, 'obs_moved', moved, 'obs_waiting', waiting,
  'obs_running', running)
for _, id in ipairs(ids) do
  local held = redis.call('HGET', at.leaving, id)
  if held then
    redis.call('HDEL', at.leaving, id)
    redis.call('HINCRBY', at.book, 'leaving', -held)
  end
end
return {'ok', changed(at)}
